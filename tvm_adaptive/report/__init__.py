"""The report of a run: what it did and why, readable without a network."""

from tvm_adaptive.report.history import RunHistory, read_run, read_runs
from tvm_adaptive.report.page import write_report

__all__ = ["RunHistory", "read_run", "read_runs", "write_report"]
