"""Search and build in other processes: results, lost lanes and full runs."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import tvm
from tvm import te

from tvm_adaptive import TuneConfig, tune, tune_tir
from tvm_adaptive._tvm import BuilderInput, BuilderResult, PyBuilder, derived_object
from tvm_adaptive.cost_model.surrogate import Surrogate, SurrogateOptions
from tvm_adaptive.errors import InvalidOptionError, LaneError
from tvm_adaptive.measure_callback import read_journal
from tvm_adaptive.search_strategy.schedules import key_of
from tvm_adaptive.tuning.config import FinishConfig, MeasureConfig, SearchConfig
from tvm_adaptive.tuning.lanes.lanes import MAX_TRIES, ProcessLanes
from tvm_adaptive.tuning.lanes.request import Built
from tvm_adaptive.tuning.lanes.search import ArtifactCache, CachedArtifactBuilder
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.scratch import ScratchFolder

# The lanes cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def lanes() -> Any:
    server = ForkServer(["tvm_adaptive.tuning.lanes.fill"])
    with contextlib.closing(server), contextlib.closing(ProcessLanes(1, server)) as lanes:
        yield lanes


@pytest.mark.slow
def test_a_round_elsewhere_brings_what_it_would_have_brought_here(
    lanes: ProcessLanes, make_task: Any
) -> None:
    here, elsewhere = make_task(), make_task(lanes)
    for _ in range(3):
        assert here.round() == elsewhere.round()
    reported = [
        [(event["round"], event["n_random"], event["reason"]) for event in each.journal.of("round")]
        for each in (here, elsewhere)
    ]
    assert reported[0] == reported[1]
    assert len(reported[0]) == 3
    assert min(n_random for _, n_random, _ in reported[0]) < 8, "it has come to search"
    assert not elsewhere.journal.of("error")


def test_what_was_built_is_cached(lanes: ProcessLanes, make_task: Any) -> None:
    task = make_task(lanes)
    results = [task.cache.take(key) for key in task.round()]
    assert all(Path(str(result.artifact_path)).stat().st_size > 0 for result in results)
    assert task.journal.of("build") == []  # of the lane's own builder
    assert task.cache.take(0) is None


def test_a_limit_reaches_the_lane(lanes: ProcessLanes, make_task: Any) -> None:
    task = make_task(lanes)
    task.side.limit_next_batch(3)
    assert len(task.round()) == 3
    assert len(task.round()) > 3


def test_a_round_can_be_begun_before_it_is_asked_for(lanes: ProcessLanes, make_task: Any) -> None:
    task = make_task(lanes)
    assert not task.side.is_ready()
    task.side.begin_next_batch()
    task.side.begin_next_batch()  # it has begun
    task.side._pending.result(timeout=60)
    assert task.side.is_ready()
    assert len(task.round()) == 8
    assert not task.side.is_ready()


class NoLanes:
    """Lanes that fill nothing."""

    n_lanes = 2

    def submit(self, request: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(LaneError("nobody is there"))
        return answer

    def is_alive(self) -> bool:
        return False

    def close(self) -> None:
        pass


def test_without_any_lane_the_search_goes_on_here(make_task: Any) -> None:
    here, alone = make_task(), make_task(NoLanes())
    assert [here.round() for _ in range(2)] == [alone.round() for _ in range(2)]
    errors = alone.journal.of("error")
    assert [error["message"] for error in errors] == ["nobody is there"] * 2
    assert errors[0]["task"] == "gmm"


class DeadLanes(NoLanes):
    """Lanes that take a request and die."""

    def submit(self, request: Any) -> Future[Any]:
        return Future()


def test_lanes_that_die_are_not_waited_for(make_task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvm_adaptive.tuning.lanes.search.POLL_SEC", 0.1)
    here, alone = make_task(), make_task(DeadLanes())
    assert here.round() == alone.round()
    assert alone.journal.of("error")[0]["message"] == "no lane is left"


class SlowLanes(DeadLanes):
    """Lanes that take a request and never answer."""

    def is_alive(self) -> bool:
        return True


def test_no_lane_is_waited_for_longer_than_the_search_has_left(make_task: Any) -> None:
    late = make_task(SlowLanes())
    late.side.time_left = iter([5e-3, 0.0]).__next__
    assert late.side.generate_measure_candidates() is None
    assert not late.journal.of("error")


class Bomb:
    """What ends the process that unpacks it, and notes it."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def __reduce__(self) -> Any:
        return explode, (str(self.note),)


def explode(note: str) -> None:
    with open(note, "a") as file:
        file.write("x")
    os._exit(7)


def test_a_process_that_dies_costs_one_more_try(lanes: ProcessLanes, tmp_path: Path) -> None:
    note: Any = tmp_path / "note"
    answer = lanes.submit(Bomb(note)).result(timeout=60)  # type: ignore[arg-type]
    assert isinstance(answer, LaneError)
    assert "exit code 7" in str(answer)
    assert note.read_text() == "x" * MAX_TRIES


def test_a_request_that_cannot_be_answered_is_not_tried_again(lanes: ProcessLanes) -> None:
    answer = lanes.submit(None).result(timeout=60)  # type: ignore[arg-type]
    assert isinstance(answer, LaneError)
    assert "AttributeError" in str(answer)


class Litter:
    """What makes temporary folders where it is unpacked, and ends the process."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def __reduce__(self) -> Any:
        return litter, (str(self.note),)


def litter(note: str) -> None:
    folders = [str(ScratchFolder("lane").path), tempfile.mkdtemp()]
    with open(note, "a") as file:
        file.write("".join(f"{folder}\n" for folder in folders))
    os._exit(7)


@pytest.mark.slow
def test_nothing_stays_of_lanes_that_were_killed(tmp_path: Path) -> None:
    note: Any = tmp_path / "note"
    with contextlib.closing(ProcessLanes(1)) as lanes:
        answer = lanes.submit(Litter(note)).result(timeout=200)  # type: ignore[arg-type]
        assert isinstance(answer, LaneError)
        made = [Path(line) for line in note.read_text().splitlines()]
        (place,) = {path.parent for path in made}
        assert place.name.startswith("tvm-adaptive-lanes-")
        assert any(path.exists() for path in made)
    assert not place.exists()


@derived_object
class NamingBuilder(PyBuilder):  # type: ignore[misc]
    """Builds nothing, and says so."""

    def build(self, build_inputs: list[BuilderInput]) -> list[BuilderResult]:
        return [BuilderResult(None, f"inner {number}") for number, _ in enumerate(build_inputs)]


def test_what_is_not_cached_is_built_here(make_task: Any, tmp_path: Path) -> None:
    task = make_task()
    batch = task.strategy.generate_measure_candidates()[:4]
    keys = [key_of(candidate.sch) for candidate in batch]
    cache = ArtifactCache(tmp_path / "not" / "yet")
    cache.put(Built(keys[1], b"library", "", 0.1))
    cache.put(Built(keys[2], None, "no registers left", 0.1))
    builder = CachedArtifactBuilder(cache, NamingBuilder())
    inputs = [BuilderInput(candidate.sch.mod, task.context.target) for candidate in batch]
    found = builder.build(inputs)
    assert [result.error_msg for result in found] == [
        *("inner 0", None, "no registers left", "inner 1")
    ]
    assert Path(str(found[1].artifact_path)).read_bytes() == b"library"


class FullLanes(NoLanes):
    """Lanes whose machine has no room for what they build."""

    def __init__(self, lanes: ProcessLanes) -> None:
        self.lanes = lanes

    def submit(self, request: Any) -> Future[Any]:
        result: Any = self.lanes.submit(request).result(timeout=60)
        full = [
            dataclasses.replace(each, artifact=None, error="machine: no space left on device")
            for each in result.candidates
        ]
        answer: Future[Any] = Future()
        answer.set_result(dataclasses.replace(result, candidates=full))
        return answer


def test_what_a_lane_has_no_room_for_is_built_here(lanes: ProcessLanes, make_task: Any) -> None:
    task = make_task(FullLanes(lanes))
    keys = task.round()
    assert keys
    assert [task.cache.take(key) for key in keys] == [None] * len(keys)
    (error,) = task.journal.of("error")
    assert (error["where"], error["message"]) == ("lane", "machine: no space left on device")


def test_what_there_is_no_room_for_here_costs_the_round_nothing(
    lanes: ProcessLanes, make_task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: Any, **_options: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    task = make_task(lanes)
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    keys = task.round()
    assert keys
    assert [task.cache.take(key) for key in keys] == [None] * len(keys)
    (error,) = task.journal.of("error")
    assert error["message"] == "[Errno 28] No space left on device"


def test_a_frozen_model_answers_as_the_model() -> None:
    rng = np.random.default_rng(0)
    surrogate = Surrogate(SurrogateOptions(n_jobs=1), seed=1)
    for key in ("one", "two"):
        rows = rng.random((40, 6)).astype(np.float32)
        seconds = 1e-3 * (1.0 + rows.sum(axis=1).astype(np.float64))
        seconds[::9] = np.nan
        surrogate.add(key, rows, seconds)
    surrogate.refit_if_due()
    frozen = surrogate.frozen()
    unseen = rng.random((10, 6)).astype(np.float32)
    for key in ("one", "two", "three"):
        assert np.array_equal(surrogate.scores(key, unseen), frozen.scores(key, unseen))
        ours, theirs = surrogate.posterior(key, unseen), frozen.posterior(key, unseen)
        assert (ours is None) == (theirs is None) == (key == "three")
        if ours is not None and theirs is not None:
            assert np.array_equal(ours.mean, theirs.mean)
            assert np.array_equal(ours.std, theirs.std)
    assert frozen.refit_if_due() is None
    assert len(frozen.dataset) == 2
    assert len(surrogate.dataset) == 80


def matmul(n: int, size: int = 64) -> Any:
    a = te.placeholder((n, size), name="a")
    b = te.placeholder((size, size), name="b")
    k = te.reduce_axis((0, size), name="k")
    c = te.compute((n, size), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    return te.create_prim_func([a, b, c]).with_attr("global_symbol", f"rows{n}")


QUICK = TuneConfig(
    search=SearchConfig(n_trials_per_round=4, lanes=2),
    finish=FinishConfig(top_k=1, max_task_sec=0.5),
    store="none",
)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["processes", "ray"])
def test_a_whole_run_on_lanes(where: str, tmp_path: Path) -> None:
    config = QUICK
    if where == "ray":
        pytest.importorskip("ray")
        search = dataclasses.replace(QUICK.search, lanes=1, ray="local")
        config = config.replace(search=search)
    mod = tvm.IRModule({f"rows{n}": matmul(n) for n in (32, 64, 128)})
    report = tune_tir(mod, work_dir=tmp_path, trials=36, seed=1, config=config)
    assert (report.n_trials, report.n_errors) == (36, 0)
    assert report.comparison is not None
    assert report.comparison.agree
    events = read_journal(tmp_path / "journal.jsonl")
    assert not [event for event in events if event["event"] == "error"]
    kinds = [event["event"] for event in events]
    # The second slot is decided on before the first is measured.
    assert kinds.index("slot", kinds.index("slot") + 1) < kinds.index("measured") or where == "ray"
    assert list((tmp_path / "artifacts").rglob("*.tar")) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_batches_on_lanes_with_overlap_record_no_failure(tmp_path: Path) -> None:
    config = QUICK.replace(measure=MeasureConfig(overlap=True))
    report = tune("te:GMM", work_dir=tmp_path, trials=400, seed=1, config=config)
    assert (report.n_trials, report.n_errors) == (400, 0)
    batches = [
        event for event in read_journal(tmp_path / "journal.jsonl") if event["event"] == "measured"
    ]
    assert len(batches) == 100


@pytest.mark.parametrize(
    "changes", [{"cost_model": "xgb"}, {"strategy": "evolutionary"}, {"cost_model": "rfei-family"}]
)
def test_only_what_can_travel_is_sent(changes: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="Searching elsewhere"):
        tune_tir(
            tvm.IRModule({"rows32": matmul(32)}),
            work_dir=tmp_path,
            trials=4,
            config=QUICK.replace(**changes),
        )
