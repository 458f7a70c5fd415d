"""Measure on devices behind TVM's RPC tracker."""
