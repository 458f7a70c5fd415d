from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.tuning.observers import Notes
from tvm_adaptive import tune
from tvm_adaptive._tvm import RPCConfig, python_side
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.history import History
from tvm_adaptive.tuning import parts as parts_module
from tvm_adaptive.tuning import session as session_module
from tvm_adaptive.tuning.config import (
    DEFAULT,
    PAPER,
    MeasureConfig,
    ModelConfig,
    SchedulerConfig,
    SearchConfig,
)
from tvm_adaptive.tuning.parts import Parts, check_parts, make_parts
from tvm_adaptive.tuning.target import n_cores_of
from tvm_adaptive.values.trial_log import TrialLog


def test_stocks_builder_has_time_to_import_what_it_imports(make_session: Any) -> None:
    measure = dataclasses.replace(DEFAULT.measure, build_timeout_sec=7.0)
    session = make_session(DEFAULT.replace(builder="local", measure=measure))
    with contextlib.closing(make_parts(session)) as parts:
        # Three times the half minute that two quiet cores need.
        assert parts.builder.timeout_sec >= 7.0 + 90.0
        assert parts.builder.max_workers == n_cores_of(session.target)


def test_stocks_runner_has_a_candidates_seconds(make_session: Any) -> None:
    measure = MeasureConfig(timeout_sec=90.0)
    session = make_session(DEFAULT.replace(runner="local", measure=measure))
    with contextlib.closing(make_parts(session)) as parts:
        assert parts.runner.timeout_sec >= 90.0


@pytest.mark.parametrize(("builder", "prefetch"), [("persistent", True), ("local", False)])
def test_only_our_builder_gets_variants_that_it_compiles(
    make_session: Any, builder: str, prefetch: bool
) -> None:
    session = make_session(DEFAULT.replace(builder=builder))
    with contextlib.closing(make_parts(session)) as parts:
        assert python_side(parts.strategy).inner.options.prefetch == prefetch


def test_a_model_that_needs_pytorch_is_refused_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(InvalidOptionError, match="pip install"):
        check_parts(DEFAULT.replace(cost_model="mlp"))


def test_stocks_runner_measures_on_the_farm_that_is_named(make_session: Any) -> None:
    measure = MeasureConfig(tracker="127.0.0.1:9", tracker_key="board")
    session = make_session(DEFAULT.replace(runner="rpc", measure=measure))
    with contextlib.closing(make_parts(session)) as parts:
        config = parts.runner.rpc_config
        assert (config.tracker_host, config.tracker_port) == ("127.0.0.1", 9)
        assert config.tracker_key == "board"


def test_search_and_scheduler_tell_the_session_which_tasks_have_ended(make_session: Any) -> None:
    session = make_session()
    with contextlib.closing(make_parts(session)) as parts:
        python_side(parts.strategy).on_end("a")
        python_side(parts.task_scheduler).on_end("b")
    assert session.ended == {"a", "b"}


def test_a_farm_gets_the_speeds_of_earlier_attempts(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        parts_module, "_made", lambda _part, _name, ours, _stock: asked.update(ours)
    )
    measure = MeasureConfig(tracker="127.0.0.1:9", tracker_key="board")
    config = DEFAULT.replace(runner="adaptive-rpc", measure=measure)
    history = History(board_speeds={"a:1": 0.5})
    parts_module._runner(make_session(config, history=history), TrialLog())
    assert asked["earlier_speeds"] == {"a:1": 0.5}


FARM = RPCConfig("127.0.0.1", 9, "board", 1, 5)


@pytest.mark.parametrize(
    ("farm", "search", "is_noted"),
    [
        (None, SearchConfig(lanes=2), True),
        (None, SearchConfig(), False),
        (FARM, SearchConfig(lanes=2), False),
    ],
)
def test_lanes_beside_kernels_that_are_timed_are_noted(
    make_session: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    farm: RPCConfig | None,
    search: SearchConfig,
    is_noted: bool,
) -> None:
    monkeypatch.setattr(parts_module, "ProcessLanes", lambda *_: FakeLanes())
    observer = Notes()
    session = make_session(DEFAULT.replace(search=search), farm=farm, observer=observer)
    with contextlib.closing(make_parts(session)):
        assert any("disturbs the times" in note for note in observer.notes) == is_noted


class FakeLanes:
    """Search nothing."""

    n_lanes = 2

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("farm", "search", "n_lane", "n_here"),
    [
        (None, SearchConfig(), 2, 2),  # as many as the target's cores
        (FARM, SearchConfig(), 16, 16),
        (FARM, SearchConfig(lanes=4), 4, 16),
        (FARM, SearchConfig(lanes=32), 1, 16),
        (FARM, SearchConfig(ray="local"), 2, 16),
    ],
)
def test_lanes_share_the_cores_of_the_machine_that_compiles(
    make_session: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    farm: RPCConfig | None,
    search: SearchConfig,
    n_lane: int,
    n_here: int,
) -> None:
    monkeypatch.setattr(session_module, "usable_physical_cores", lambda: 16)
    monkeypatch.setattr(parts_module, "n_build_workers", lambda n_cores: n_cores)
    session = make_session(DEFAULT.replace(search=search), farm=farm)
    assert parts_module._n_builders(session) == n_lane
    builder = parts_module.make_playoff_builder(session, session.work_dir)
    with contextlib.closing(builder):
        assert builder.max_workers == n_here


@pytest.mark.parametrize(
    ("changes", "takes_seeds"),
    [
        ({}, True),
        ({"strategy": "evolutionary"}, False),
        ({"search": SearchConfig(proposer="evolution")}, False),
        ({"search": SearchConfig(seeds=False)}, False),
        ({"cost_model": "rfei-family"}, True),
        ({"cost_model": "xgb"}, False),
        ({"cost_model": "random"}, False),
    ],
)
def test_only_a_search_on_decisions_shares_records(
    make_session: Any, changes: dict[str, Any], takes_seeds: bool
) -> None:
    with contextlib.closing(make_parts(make_session(DEFAULT.replace(**changes)))) as parts:
        assert (parts.transfer_pool is not None) == takes_seeds


FORESIGHT = SchedulerConfig(foresee_share=0.25)


@pytest.mark.parametrize("cost_model", ["rfei", "rfei-family"])
def test_foresee_slots_follow_the_forecasts_of_our_models(cost_model: str) -> None:
    check_parts(DEFAULT.replace(cost_model=cost_model, scheduler=FORESIGHT))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"search": SearchConfig(diversity="any")}, "diversity"),
        ({"search": SearchConfig(epsilon=1.5)}, "epsilon"),
        ({"search": SearchConfig(lanes=2), "cost_model": "xgb"}, "Searching elsewhere"),
        ({"model": ModelConfig(std="none")}, "std"),
        ({"measure": MeasureConfig(rule="guess")}, "rule"),
        ({"measure": MeasureConfig(devices="1"), "runner": "local"}, "runner adaptive"),
        ({"measure": MeasureConfig(tracker="farm:9190")}, "tracker is of the runners"),
        ({"measure": MeasureConfig(tracker_key="b"), "runner": "local"}, "tracker_key is of"),
        ({"scheduler": SchedulerConfig(foresee_share=2.0)}, "foresee_share"),
        ({"scheduler": FORESIGHT, "cost_model": "xgb"}, "not adaptive, surrogate and xgb"),
        ({"scheduler": FORESIGHT, "strategy": "evolutionary"}, "foresee_share follows"),
        ({"scheduler": FORESIGHT, "search": PAPER.search}, "not adaptive, evolution and rfei"),
    ],
)
def test_what_a_part_would_refuse_is_refused_before_a_run_begins(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(InvalidOptionError, match=text):
        tune("te:GMM", work_dir=folder, trials=4, config=DEFAULT.replace(**changes))
    assert not folder.exists()


class Closeable:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        if self.error is not None:
            raise self.error


def test_a_part_that_fails_to_close_is_heard_and_the_others_are_closed(tmp_path: Path) -> None:
    builder, runner, lanes = Closeable(AttributeError("no pool")), Closeable(), Closeable()
    stock: Any = object()  # has nothing to close
    closeable = (runner, stock, builder, None, lanes)
    parts = Parts(stock, stock, stock, stock, stock, None, TrialLog(), tmp_path, closeable)
    with pytest.raises(AttributeError, match="no pool"):
        parts.close()
    assert builder.is_closed
    assert runner.is_closed
    assert lanes.is_closed


def test_what_a_killed_attempt_has_left_is_removed_and_nothing_else(make_session: Any) -> None:
    session = make_session()
    left, scratch = (session.work_dir / "artifacts" / n for n in ("candidate-x", "tvm-adaptive-y"))
    mine = session.work_dir / "artifacts" / "mine.txt"
    for folder in (left, scratch):
        folder.mkdir(parents=True)
        (folder / "a.so").write_text("")
    mine.write_text("")
    with contextlib.closing(make_parts(session)):
        assert not left.exists()
        assert not scratch.exists()
        assert mine.exists()


def test_what_workers_held_in_a_batch_is_removed_after_their_end(make_session: Any) -> None:
    session = make_session()
    left = session.work_dir / "artifacts" / "candidate-x"
    mine = session.work_dir / "artifacts" / "mine.txt"
    was_there: list[bool] = []

    class Worker:
        def close(self) -> None:
            was_there.append(left.exists())

    parts = make_parts(session)
    parts = dataclasses.replace(parts, closeable=(*parts.closeable, Worker()))
    with contextlib.closing(parts):
        left.mkdir(parents=True)
        (left / "a.so").write_text("")
        mine.write_text("")
    assert was_there == [True]
    assert not left.exists()
    assert mine.exists()


def test_a_file_that_is_held_for_a_moment_does_not_keep_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "artifacts" / "candidate-x"
    left.mkdir(parents=True)
    remove, held = os.rmdir, [left.name]

    def remove_later(path: Any, **options: Any) -> None:
        if Path(path).name in held:
            held.remove(Path(path).name)
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", remove_later)
    parts_module.remove_candidates(tmp_path)
    assert held == []
    assert not left.exists()
