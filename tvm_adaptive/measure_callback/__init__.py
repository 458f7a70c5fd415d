"""Callbacks that record a run while it runs."""

from tvm_adaptive.measure_callback.journal import read_journal

__all__ = ["read_journal"]
