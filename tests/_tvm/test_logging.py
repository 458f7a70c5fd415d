"""What MetaSchedule prints while tasks are set up for a run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import contexts_of, functions_as_tasks, te_workload
from tvm_adaptive.search_strategy.strategy import AdaptiveSearch
from tvm_adaptive.tuning.target import resolve_target


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """MetaSchedule's logger, as in a new process; as it was afterwards."""
    found = logging.getLogger("tvm.s_tir.meta_schedule")
    level, handlers = found.level, list(found.handlers)
    found.handlers.clear()
    found.setLevel(logging.NOTSET)
    yield found
    found.handlers[:] = handlers
    found.setLevel(level)


def set_up(work_dir: Path) -> None:
    tasks = functions_as_tasks(te_workload("GMM"), resolve_target("cpu"))
    contexts_of(tasks, str(work_dir), AdaptiveSearch(), 0)


def test_its_messages_are_in_files_alone(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        set_up(tmp_path / name)
        logger.info("a table")
        assert capsys.readouterr().out == ""
        written = "".join(each.read_text() for each in (tmp_path / name / "logs").iterdir())
        assert "a table" in written


def test_an_application_that_sets_a_level_sees_them(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up(tmp_path / "quiet")
    logger.setLevel(logging.INFO)
    for name in ("first", "second"):
        set_up(tmp_path / name)
        logger.info("a table")
        assert "a table" in capsys.readouterr().out


@pytest.mark.parametrize("name", [None, "mine"])
def test_handlers_of_an_application_stay(
    tmp_path: Path, logger: logging.Logger, name: str | None
) -> None:
    own = logging.NullHandler()
    own.set_name(name)
    logger.addHandler(own)
    set_up(tmp_path)
    assert own in logger.handlers


def test_files_of_an_application_stay_open(tmp_path: Path, logger: logging.Logger) -> None:
    assert not logger.handlers
    application = logging.getLogger("application")
    handler = logging.FileHandler(tmp_path / "app.log", mode="w")
    application.addHandler(handler)
    try:
        set_up(tmp_path / "run")
        application.error("afterwards")
    finally:
        application.removeHandler(handler)
        handler.close()
    assert "afterwards" in (tmp_path / "app.log").read_text()


def test_levels_between_the_named_ones_are_allowed(tmp_path: Path, logger: logging.Logger) -> None:
    logger.setLevel(25)
    set_up(tmp_path)
    levels = [each.level for each in logger.handlers if str(each.get_name()).endswith(".console")]
    assert levels == [logging.WARNING]  # not rounded down to INFO, which prints tables


def test_threads_set_up_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def prepare(*_arguments: object, **_options: object) -> tuple[list[object], list[object]]:
        steps.append("in")
        time.sleep(0.1)
        steps.append("out")
        return [], []

    monkeypatch.setattr(_tvm, "extracted_tasks_to_tune_contexts", prepare)
    threads = [threading.Thread(target=set_up, args=(tmp_path,)) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert steps == ["in", "out", "in", "out"]
