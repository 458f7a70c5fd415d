"""The report of a run: what it did and why, readable without a network."""

from typing import Any

from tvm_adaptive.report.history import RunHistory, read_run, read_runs
from tvm_adaptive.report.page import write_report
from tvm_adaptive.values.moved import former_name

__all__ = ["RunHistory", "read_run", "read_runs", "write_report"]


def __getattr__(name: str) -> Any:
    return former_name(__name__, name)
