"""Measure candidates."""
