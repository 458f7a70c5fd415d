from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tuning.runs import journalled_trials
from tvm_adaptive.cli import main
from tvm_adaptive.measure_callback.progress import RunProgress
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.observer import GuardedObserver


class Broken:
    """Fails at its second call."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.calls: list[str] = []

    def stage(self, name: str) -> None:
        self._take(name)

    def round(self, progress: Any, budget: Any) -> None:
        self._take("round")

    def note(self, text: str) -> None:
        self._take(text)

    def _take(self, what: str) -> None:
        self.calls.append(what)
        if len(self.calls) > 1:
            raise self.error


# rich ends a program whose pipe is closed with SystemExit.
@pytest.mark.parametrize("error", [RuntimeError("gone"), BrokenPipeError(), SystemExit(1)])
def test_an_observer_that_fails_gets_no_more_events(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken(error)
    guarded = GuardedObserver(broken)
    with caplog.at_level(logging.WARNING):
        guarded.event({"event": "run"})  # it has no such method
        guarded.stage("search")
        guarded.round(RunProgress([]), Budget(None))
        guarded.note("text")
        guarded.close()
    assert broken.calls == ["search", "round"]
    assert len(caplog.records) == 1
    assert "the run continues without it" in caplog.text


def test_ctrl_c_in_an_observer_is_no_failure_of_it() -> None:
    broken = Broken(KeyboardInterrupt())
    guarded = GuardedObserver(broken)
    guarded.stage("search")
    with pytest.raises(KeyboardInterrupt):
        guarded.stage("search")


def test_nobody_may_watch() -> None:
    guarded = GuardedObserver(None)
    guarded.note("text")
    guarded.close()


@pytest.fixture
def no_readers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Standard output and error are pipes whose readers have left."""
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr"):
            reads, writes = os.pipe()
            os.close(reads)
            stream = stack.enter_context(open(writes, "w", encoding="utf-8"))
            monkeypatch.setattr(sys, name, stream)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("no_readers")
def test_a_run_whose_readers_have_left_comes_to_its_end(tmp_path: Path) -> None:
    arguments = ["te:GMM", "--trials", "4", "--store", "none", "--work-dir", str(tmp_path)]
    assert main(["tune", *arguments]) == 0
    assert journalled_trials(tmp_path) == 4
    assert main(["show", str(tmp_path)]) == 0
    assert main(["tune", "--resume", str(tmp_path / "none")]) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_into_head_comes_to_its_end(tmp_path: Path) -> None:
    work_dir = tmp_path / "run"
    command = f"{sys.executable} -m tvm_adaptive tune te:GMM --trials 4 --store none"
    script = f"{command} --work-dir {work_dir} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0
    assert "1 tasks" in done.stdout
    assert done.stderr == ""
    assert journalled_trials(work_dir) == 4
