"""Rounds in which the tuned library and frameworks take turns; the frameworks are real."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.journals import MemoryJournal
from tests.tuning.observers import Notes
from tvm_adaptive.errors import WorkerTaskError
from tvm_adaptive.models.frontend import PEERS, READER_ENV
from tvm_adaptive.models.network import Original
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.checks import peers
from tvm_adaptive.tuning.checks.library import LEAST_RUN_SEC
from tvm_adaptive.tuning.checks.peers import Rivals, n_rivals, rivals_reserve_sec
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.values.agreement import outputs_problem
from tvm_adaptive.workers.pool import Outcome, WorkerPool

INPUTS = [np.arange(6, dtype="float32").reshape(2, 3)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    onnx = pytest.importorskip("onnx")
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    node = make.make_node("Add", ["x", "x"], ["y"])
    ends = [[make.make_tensor_value_info(name, kind, [2, 3])] for name in "xy"]
    model = make.make_model(
        make.make_graph([node], "net", *ends), opset_imports=[make.make_opsetid("", 17)]
    )
    model.ir_version = 9
    path = tmp_path_factory.mktemp("model") / "net.onnx"
    onnx.save(model, str(path))
    return path


def original_of(path: Path) -> Original:
    return Original("ONNX Runtime 1.0", lambda inputs: [2 * inputs[0]], file=lambda _: path)


def test_the_frameworks_take_turns_with_the_library(
    path: Path, make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_ROUNDS", 3)
    observer, journal = Notes(), MemoryJournal()
    session = make_session(DEFAULT.replace(peers="torch,ort"), observer=observer, journal=journal)
    turns = iter([0.25, 0.5, 1.0])
    rivals = Rivals(session, original_of(path), INPUTS, outputs_problem)
    secs = rivals.time([2 * INPUTS[0]], lambda seconds: next(turns))
    (timing,) = rivals.timings
    assert secs == [0.25, 0.5, 1.0]
    assert timing.tuned_secs == (0.25, 0.5, 1.0)
    assert (timing.name, timing.framework, timing.n_threads) == ("ort", "ONNX Runtime 1.0", 2)
    assert (timing.agree, timing.max_abs) == (True, 0.0)
    assert len(timing.secs) == 3
    assert min(timing.secs) > 0.0
    ratios = np.array(timing.secs) / timing.tuned_secs
    assert timing.speedup == pytest.approx(sorted(ratios)[1])
    (note,) = observer.notes
    assert note.endswith("is not compared: it does not read .onnx files")
    assert journal.of("error")[0]["where"].startswith("peer PyTorch")
    assert not list(session.work_dir.iterdir())


def test_the_process_that_has_read_the_model_times_its_framework(
    path: Path, make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> Any:
        raise AssertionError("another process is started")

    monkeypatch.setattr(peers, "_ROUNDS", 1)
    pool = WorkerPool(1, env=READER_ENV)
    (before,) = pool.map(os.getpid, [()], 60.0)
    monkeypatch.setattr(peers, "WorkerPool", refuse)
    original = dataclasses.replace(original_of(path), worker=pool)
    rivals = Rivals(make_session(), original, INPUTS, outputs_problem)
    assert rivals.time([2 * INPUTS[0]], lambda seconds: 1.0) == [1.0]
    assert [each.name for each in rivals.timings] == ["ort"]
    assert pool.map(os.getpid, [()], 60.0)[0].value == before.value  # for a second comparison
    pool.close()


def test_a_library_that_cannot_be_timed_is_compared_with_nothing(
    path: Path, make_session: Any
) -> None:
    rivals = Rivals(make_session(), original_of(path), INPUTS, outputs_problem)
    assert rivals.time([2 * INPUTS[0]], lambda seconds: None) == []
    assert rivals.timings == []


def test_a_model_that_cannot_be_written_costs_a_note(make_session: Any) -> None:
    def fail(folder: Path) -> Path:
        raise RuntimeError("not serializable")

    observer = Notes()
    original = Original("PyTorch 9", lambda inputs: [], file=fail)
    rivals = Rivals(make_session(observer=observer), original, INPUTS, outputs_problem)
    assert len(rivals.time([], lambda seconds: 1.0)) == peers._ROUNDS
    assert observer.notes == ["PyTorch 9 is not compared: not serializable"]


class Pool:
    """Answers as scripted, and lets the clock go on."""

    def __init__(self, clock: list[float], answers: list[Outcome]) -> None:
        self.clock, self.answers = clock, answers
        self.limits: list[float] = []

    def __call__(self, *_arguments: Any, **_options: Any) -> Pool:
        return self

    def map(self, _function: Any, _tasks: Any, timeout_sec: float) -> list[Outcome]:
        self.limits.append(timeout_sec)
        self.clock[0] += 1.0
        return [self.answers.pop(0)]

    def close(self) -> None:
        pass


def rounds_of(
    make_session: Any,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    answers: list[Outcome],
    observer: Notes | None = None,
) -> tuple[Rivals, list[float], list[float], Pool]:
    """Let one framework and the library take turns of a second each by a clock that is set."""
    clock = [0.0]
    pool, turns = Pool(clock, answers), []
    monkeypatch.setattr(peers, "WorkerPool", pool)
    monkeypatch.setattr(peers, "_SETTLE_SEC", 0.0)

    def time_tuned(turn_sec: float) -> float:
        turns.append(turn_sec)
        clock[0] += 1.0
        return 0.5

    session = make_session(budget=Budget(seconds, lambda: clock[0]), observer=observer or Notes())
    rivals = Rivals(session, original_of(Path("net.onnx")), INPUTS, outputs_problem)
    secs = rivals.time([2 * INPUTS[0]], time_tuned)
    return rivals, secs, turns, pool


def test_rounds_end_before_the_budget(make_session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Outcome([2 * INPUTS[0]]), *(Outcome(0.1) for _ in range(7))]
    rivals, secs, turns, pool = rounds_of(make_session, monkeypatch, 7.0, answers)
    # One second to start; then 70 % of the six that are left, which is three rounds of two.
    assert len(secs) == len(rivals.timings[0].secs) == 3
    assert pool.limits[0] == pytest.approx(0.4 * 7.0)
    assert max(pool.limits[1:]) <= 6.0
    assert turns == pytest.approx([0.7 * 6.0 / (2.0 * 14)] * 3)


def test_without_time_no_framework_is_started(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rivals, secs, _, pool = rounds_of(make_session, monkeypatch, 2.0, [])
    assert (rivals.timings, pool.limits) == ([], [])
    assert len(secs) == 2


def test_no_round_is_begun_that_the_end_of_the_budget_would_cut_short(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [Outcome([2 * INPUTS[0]]), *(Outcome(0.1) for _ in range(7))]
    rivals, secs, _, pool = rounds_of(make_session, monkeypatch, 4.5, answers)
    # One second to start and two for a round leave 1.5: the framework would be stopped in it.
    assert len(secs) == len(rivals.timings[0].secs) == 1
    assert min(pool.limits[1:]) >= 1.0


def test_no_round_is_begun_in_which_the_library_could_not_be_run(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, left_secs = [0.0], list[float]()
    budget = Budget(2.5, lambda: clock[0])

    def time_tuned(_turn_sec: float) -> float:
        left_secs.append(budget.left_sec)
        clock[0] += 0.4
        return 0.5

    monkeypatch.setattr(peers, "_SETTLE_SEC", 0.0)
    rivals = Rivals(make_session(budget=budget), None, INPUTS, outputs_problem)
    rivals.time([2 * INPUTS[0]], time_tuned)
    # Of the 1.75 s that rounds may take, a fifth one would begin after 1.6 s.
    assert len(left_secs) == 4
    assert min(left_secs) >= LEAST_RUN_SEC


def test_a_framework_that_runs_already_needs_less_time(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    pool = Pool(clock, [Outcome([2 * INPUTS[0]]), Outcome(0.1)])
    budget = Budget(2.0, lambda: clock[0])
    original: Any = dataclasses.replace(original_of(Path("net.onnx")), worker=pool)
    monkeypatch.setattr(peers, "_SETTLE_SEC", 0.0)
    rivals = Rivals(make_session(budget=budget), original, INPUTS, outputs_problem)
    rivals.time([2 * INPUTS[0]], lambda seconds: 0.5)
    assert [each.framework for each in rivals.timings] == ["ONNX Runtime 1.0"]
    assert pool.limits[0] == pytest.approx(0.4 * 2.0)  # which starts no other


@pytest.mark.parametrize("n_answers", [0, 1, 3])
def test_a_framework_that_fails_costs_a_note(
    make_session: Any, monkeypatch: pytest.MonkeyPatch, n_answers: int
) -> None:
    answers = [Outcome([2 * INPUTS[0]]), Outcome(0.1), Outcome(0.1)][:n_answers]
    answers.append(Outcome(error=WorkerTaskError("no memory")))
    observer = Notes()
    rivals, secs, _, pool = rounds_of(make_session, monkeypatch, 1000.0, answers, observer)
    assert (rivals.timings, pool.answers) == ([], [])
    assert len(secs) == peers._ROUNDS
    assert observer.notes == ["ONNX Runtime 1.0 is not compared: no memory"]


def test_a_framework_that_computes_something_else_is_told(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [Outcome([3 * INPUTS[0]]), *(Outcome(0.1) for _ in range(7))]
    observer = Notes()
    rivals, *_ = rounds_of(make_session, monkeypatch, 1000.0, answers, observer)
    assert [timing.agree for timing in rivals.timings] == [False]
    assert "ONNX Runtime 1.0 computes something else: output 0: 5 of 6" in observer.notes[0]


def test_a_model_s_own_framework_counts_once() -> None:
    original = Original(PEERS["ort"].framework, list)
    assert n_rivals(None, "ort") == 0
    assert n_rivals(original, "") == n_rivals(original, "ort") == 1
    assert n_rivals(original, "ort,openvino") == n_rivals(original, "openvino") == 2


def test_the_reserve_grows_with_the_frameworks() -> None:
    none, own, two = (rivals_reserve_sec(n, 5.0 * (n > 0), None) for n in range(3))
    assert 0.0 < none < own - 5.0 < two - 10.0
    assert rivals_reserve_sec(2, 5.0, 20.0) == pytest.approx(1.0)
    assert set(PEERS) == {"ort", "openvino", "torch", "inductor"}
