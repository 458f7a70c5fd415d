"""What MetaSchedule prints while tasks are set up for a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_nameless_handlers_of_an_application_stay(tmp_path: Path, logger: logging.Logger) -> None:
    own = logging.NullHandler()
    logger.addHandler(own)
    set_up(tmp_path)
    assert own in logger.handlers
