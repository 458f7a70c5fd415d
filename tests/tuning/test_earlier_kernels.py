"""A resumed run on a machine that is faster or slower than in the earlier attempt."""

from __future__ import annotations

import contextlib
import itertools
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from tvm.s_tir import meta_schedule as ms

from tests.journals import MemoryJournal
from tvm_adaptive._tvm import (
    TVM_VERSION,
    BuilderInput,
    BuilderResult,
    Database,
    PyBuilder,
    TuneContext,
    copy_record,
    derived_object,
    json_database,
    memory_database,
    module_key,
    te_workload,
)
from tvm_adaptive.cost_model import RFEICostModel
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.run_database import RunDatabase
from tvm_adaptive.database.verdicts import VerdictFile
from tvm_adaptive.runner.local import AdaptiveRunner
from tvm_adaptive.runner.playoff.modules import mean_sec, sane_records, scheduled
from tvm_adaptive.search_strategy import AdaptiveSearch
from tvm_adaptive.task_scheduler import AdaptiveScheduler
from tvm_adaptive.tuning import earlier_kernels
from tvm_adaptive.tuning.earlier_kernels import with_earlier_kernels
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.values.trial import Timing
from tvm_adaptive.values.trial_log import TrialLog

# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

TRIALS = 8


def latency_sec(key: int) -> float:
    """Return some time of a program's, the same every time."""
    return 1e-3 * (1 + key % 97)


def fake_measure(artifact_path: str, _kind: str, _args: Any, _options: Any) -> Timing:
    """Time a file: it names the machine's folder, and seconds at a slowness of 1."""
    folder, sec = Path(artifact_path).read_text().splitlines()
    raw_sec = float(sec) * float((Path(folder) / "slowness").read_text())
    return Timing(raw_sec, 0.01 * raw_sec, 10, 10, "precise", 0.0)


@derived_object
class FileBuilder(PyBuilder):  # type: ignore[misc]
    """Builds files for :func:`fake_measure`, unless it is to refuse a program."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.batches: list[list[int]] = []  # of programs, by their keys
        self.refused: set[int] = set()
        self._numbers = itertools.count()

    def build(self, build_inputs: list[BuilderInput]) -> list[BuilderResult]:
        """Return a result per input."""
        keys = [module_key(each.mod) for each in build_inputs]
        self.batches.append(keys)
        return [self._built(key) for key in keys]

    def _built(self, key: int) -> BuilderResult:
        if key in self.refused:
            return BuilderResult(None, "refused")
        path = self.folder / f"built-{next(self._numbers)}" / "kernel.so"
        path.parent.mkdir()
        path.write_text(f"{self.folder}\n{latency_sec(key)}")
        return BuilderResult(str(path), None)


def task(strategy: Any = None, seed: int = 7) -> TuneContext:
    return TuneContext(
        te_workload("GMM"),
        target=resolve_target({"kind": "llvm", "num-cores": 2}),
        space_generator="post-order-apply",
        search_strategy=strategy,
        task_name="gmm",
        rand_state=seed,
        num_threads=1,
    )


def attempt(folder: Path, database: Database, slowness: float, seed: int) -> list[dict[str, Any]]:
    """Tune while the machine is so slow; return the events of batches."""
    (folder / "slowness").write_text(str(slowness))
    journal, trial_log = MemoryJournal(), TrialLog()
    context = task(AdaptiveSearch(n_samples=16, trial_log=trial_log), seed)
    runner = AdaptiveRunner(measure=fake_measure, trial_log=trial_log, journal=journal)
    inner = FileBuilder(folder)
    with (
        contextlib.closing(runner),
        with_earlier_kernels(inner, trial_log, [context], database) as builder,
    ):
        ms.tune.tune_tasks(
            tasks=[context],
            task_weights=[1.0],
            work_dir="",
            max_trials_global=TRIALS,
            num_trials_per_iter=4,
            builder=builder,
            runner=runner,
            database=database,
            cost_model=RFEICostModel(n_trees=8, seed=seed, n_jobs=1),
            measure_callbacks=[
                ms.measure_callback.AddToDatabase(),
                ms.measure_callback.UpdateCostModel(),
                ms.measure_callback.RemoveBuildArtifact(),
            ],
            task_scheduler=AdaptiveScheduler("default", seed=seed),
        )
    assert not list(folder.glob("built-*"))
    return journal.of("duet")


@pytest.mark.parametrize("slowness", [0.5, 2.0])
def test_all_attempts_record_on_one_scale(tmp_path: Path, slowness: float) -> None:
    database = memory_database()
    attempt(tmp_path, database, 1.0, 1)
    before = [mean_sec(each) for each in database.get_all_tuning_records()]
    first, *_ = attempt(tmp_path, database, slowness, 2)
    # The fastest of the first attempt is timed before the second has any time.
    assert first["anchor_sec"] == pytest.approx(min(before))
    assert first["repeats_sec"] == pytest.approx([slowness * min(before)])
    # It is no trial, and nothing is recorded twice.
    records = list(database.get_all_tuning_records())
    keys = [module_key(scheduled(each)) for each in records]
    assert len(set(keys)) == len(keys) == 2 * TRIALS
    assert [mean_sec(each) for each in records] == pytest.approx([*map(latency_sec, keys)])


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Database:
    """The records of an attempt, to be read only."""
    database = memory_database()
    attempt(tmp_path_factory.mktemp("earlier"), database, 1.0, 1)
    return database


class Built:
    """A builder that adds earlier kernels, with some records to choose from."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.database = database
        self.context = task()
        mod, target = self.context.mod, self.context.target
        self.records = sane_records(self.database, mod, target)
        self.log = TrialLog()
        self.log.has_anchors = True
        self.log.batch_facts.task = "gmm"
        self.inner = FileBuilder(folder)
        self.inputs = [BuilderInput(scheduled(each), target) for each in self.records[-2:]]

    def kernel(self, place: int) -> int:
        """Return the key of one of the records, the fastest first."""
        return int(module_key(scheduled(self.records[place])))


@pytest.fixture
def built(tmp_path: Path, earlier: Database) -> Built:
    return Built(tmp_path, earlier)


def test_only_the_first_batch_has_a_kernel_beside_it(built: Built, tmp_path: Path) -> None:
    args = built.inner, built.log, [built.context], built.database
    facts = built.log.batch_facts
    with with_earlier_kernels(*args) as builder:
        assert len(builder.build([])) == 0
        built.inner.refused = {built.kernel(place) for place in (0, -1, -2)}
        for result in builder.build(built.inputs):  # nothing is timed
            assert result.error_msg == "refused"
        assert facts.earlier is None
        built.inner.refused = set()
        assert len(builder.build(built.inputs)) == 2
        assert facts.earlier is not None
        assert facts.earlier.sec == mean_sec(built.records[0])
        assert len(facts.earlier.args_info) == 3
        text = Path(facts.earlier.artifact).read_text()
        assert float(text.splitlines()[1]) == latency_sec(built.kernel(0))
        known = facts.earlier
        assert len(builder.build(built.inputs)) == 2
        assert facts.earlier is known  # until the runner has it
        facts.task = "another"
        builder.build(built.inputs)
        assert facts.earlier is None
    assert [len(keys) for keys in built.inner.batches] == [0, 3, 3, 2, 2]
    assert not Path(known.artifact).exists()


def test_a_kernel_that_cannot_be_built_is_tried_once(built: Built, tmp_path: Path) -> None:
    args = built.inner, built.log, [built.context], built.database
    built.inner.refused = {built.kernel(0)}
    with with_earlier_kernels(*args) as builder:
        for _ in range(2):
            assert [each.error_msg for each in builder.build(built.inputs)] == [None, None]
            assert built.log.batch_facts.earlier is None
    assert [len(keys) for keys in built.inner.batches] == [3, 2]


def test_records_that_cannot_be_read_cost_no_batch(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("unreadable")

    monkeypatch.setattr(earlier_kernels, "sane_records", fail)
    args = built.inner, built.log, [built.context], built.database
    with with_earlier_kernels(*args) as builder:
        assert len(builder.build(built.inputs)) == 2
    assert built.log.batch_facts.earlier is None


def test_what_a_play_off_has_disqualified_is_passed_over(built: Built, tmp_path: Path) -> None:
    written = json_database(tmp_path)
    for record in built.records:
        copy_record(record, written)
    stored = task_of(built.context.mod, built.context.target, "gmm")
    wrong = trial_of(built.records[0], failure="wrong result", run="a")
    VerdictFile(tmp_path, str(TVM_VERSION)).add(stored, [wrong])
    args = built.inner, built.log, [built.context], RunDatabase(tmp_path)
    with with_earlier_kernels(*args) as builder:
        builder.build(built.inputs)
    assert built.inner.batches[-1][-1] == built.kernel(1)


def test_without_anchors_or_records_the_builder_stays(built: Built, tmp_path: Path) -> None:
    args = [built.context], built.database
    with with_earlier_kernels(built.inner, TrialLog(), *args) as builder:
        assert builder is built.inner
    args = [built.context], memory_database()
    with with_earlier_kernels(built.inner, built.log, *args) as builder:
        assert builder is built.inner
