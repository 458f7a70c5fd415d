"""The pytest plugin that gives TVM's tests the parts of one side and notes how each test ends."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

STOCK, OURS = "stock", "ours"
PASSED, FAILED, SKIPPED, EXCLUDED = "passed", "failed", "skipped", "excluded"
UNFINISHED = "unfinished"  # the process ended, or had to be ended, before the test did
COLLECTION = "(collection)"  # stands for a file whose tests could not be collected

# TVM's CI has no use for what builds or measures; here it is what matters.
LIFTED = ("Tuning test - launches runner", "Integration test")

_REGISTERED = "gives the workers functions of its own, by an option that ours lacks"
_EXTRACTOR = "gives the model random features, by an option that ours lacks"
_MODEL = "compares attributes of stock's class (its data, its boosted trees)"
_WORDS = "expects the words of stock's error message"
# Tests that are about stock's own class, and why.
EXCLUDED_TESTS = {
    "test_meta_schedule_error_handle_build_func": _REGISTERED,
    "test_meta_schedule_error_handle_export_func": _REGISTERED,
    "test_meta_schedule_error_handle_time_out": _REGISTERED,
    "test_meta_schedule_missing_build_func": _REGISTERED,
    "test_meta_schedule_local_runner_time_out": _REGISTERED,
    "test_meta_schedule_local_runner_exception": _REGISTERED,
    "test_meta_schedule_local_runner_add_test": _REGISTERED,
    "test_meta_schedule_runner_matmul_test": _REGISTERED,
    "test_meta_schedule_runner_add_test": _REGISTERED,
    "test_meta_schedule_rpc_runner_time_out": _WORDS,
    "test_meta_schedule_xgb_model": _EXTRACTOR,
    "test_meta_schedule_xgb_model_reupdate": _EXTRACTOR,
    "test_meta_schedule_xgb_model_reload": _MODEL,
    "test_meta_schedule_xgb_model_callback_as_function": _MODEL,
}
_SHOWN = 200  # characters of an error


class TestLog:
    """Notes, as lines of JSON, which tests there are and how each ended."""

    __test__ = False

    def __init__(self, path: Path, side: str) -> None:
        self._path = path
        self._side = side
        self._made: set[str] = set()
        self._stack = contextlib.ExitStack()

    def pytest_sessionstart(self) -> None:
        """Put our parts in place before any test file is imported."""
        self._stack.enter_context(_devices_by_their_names())
        if self._side == OURS:
            from benchmarks.tvm_tests.parts import ours_in_place

            self._stack.enter_context(ours_in_place(self._made))

    def pytest_sessionfinish(self) -> None:
        """Put stock's parts back."""
        self._stack.close()

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        """Lift TVM's marks on what builds or measures, and mark what is excluded."""
        for item in items:
            item.own_markers = [mark for mark in item.own_markers if not _is_lifted(mark)]
            name = item.originalname if isinstance(item, pytest.Function) else item.name
            if self._side == OURS and name in EXCLUDED_TESTS:
                item.user_properties.append((EXCLUDED, True))
                item.add_marker(pytest.mark.skip(reason=EXCLUDED_TESTS[name]))
        self._note(collected=[_name(item) for item in items])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be imported, or skips itself."""
        if not report.passed:
            self._note(test=COLLECTION, outcome=report.outcome, error=_error(report))

    def pytest_runtest_logstart(self) -> None:
        """Begin a test."""
        self._made.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the test itself, and what went wrong before or after it."""
        if report.when != "call" and report.passed:
            return
        outcome = EXCLUDED if (EXCLUDED, True) in report.user_properties else report.outcome
        found = {"test": _name(report), "outcome": outcome}
        error = {"error": _error(report)} if report.failed else {}
        self._note(**found, **error, parts=sorted(self._made))

    def _note(self, **event: Any) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tests that a log names, with the outcome of each."""
    tests: dict[str, dict[str, Any]] = {}
    for event in _events(path):
        for name in event.get("collected", ()):
            tests[name] = {"outcome": UNFINISHED}
        test = event.pop("test", "")
        # What fails after a test counts as the test's failure.
        if test and tests.get(test, {}).get("outcome") != FAILED:
            tests[test] = {key: value for key, value in event.items() if value}
    return tests


@contextlib.contextmanager
def _devices_by_their_names() -> Iterator[None]:
    """Let tests of runners, which TVM skips, name the CPU ``llvm``, as it was called once."""
    from tvm.s_tir.meta_schedule import runner

    stock = runner.RunnerInput

    def runner_input(artifact_path: str, device_type: str, args_info: Any) -> Any:
        return stock(artifact_path, "cpu" if device_type == "llvm" else device_type, args_info)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "RunnerInput", runner_input)
        yield


def _events(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _name(test: pytest.Item | pytest.TestReport) -> str:
    """Return what stands after the file's name."""
    return test.nodeid.partition("::")[2]


def _is_lifted(mark: pytest.Mark) -> bool:
    return mark.name == "skip" and bool(mark.args) and mark.args[0] in LIFTED


def _error(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return the line of an error that says what was wrong, without where Python is installed."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    line = next(iter(text.strip().splitlines()), "")
    return line.replace(f"{sys.prefix}/", "")[:_SHOWN]
