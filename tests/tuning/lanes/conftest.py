"""A task that is searched on lanes, with results made up by a rule."""

from __future__ import annotations

import pytest
import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.testing.te_workload import create_te_workload

from tests.journals import MemoryJournal
from tvm_adaptive._tvm import python_side
from tvm_adaptive.cost_model import RFEICostModel
from tvm_adaptive.search_strategy import AdaptiveSearch
from tvm_adaptive.search_strategy.schedules import key_of
from tvm_adaptive.tuning.lanes.search import ArtifactCache, LaneSearch
from tvm_adaptive.tuning.target import resolve_target

BUILD = {"max_workers": 1, "timeout_sec": 20.0, "link": False}


class LaneTask:
    """GMM under a search of its own, on lanes if there are any."""

    def __init__(self, lanes, folder, *, seed=7, batch=8):
        self.journal = MemoryJournal()
        self.cache = ArtifactCache(folder)
        self.model = RFEICostModel(seed=3, n_jobs=1)
        strategy = AdaptiveSearch(journal=self.journal)
        if lanes is not None:
            strategy = LaneSearch(strategy, lanes, self.cache, BUILD, self.journal)
        self.context = ms.TuneContext(
            tvm.IRModule({"main": create_te_workload("GMM", 0)}),
            target=resolve_target("cpu"),
            space_generator="post-order-apply",
            search_strategy=strategy,
            task_name="gmm",
            rand_state=seed,
            num_threads=1,
        )
        self.strategy = self.context.search_strategy
        self.strategy.pre_tuning(
            1000,
            batch,
            self.context.generate_design_space(),
            ms.database.MemoryDatabase(),
            self.model,
        )

    @property
    def side(self):
        return python_side(self.strategy)

    def round(self):
        """Return the keys of a batch that was searched and 'measured'; None at the end."""
        batch = self.strategy.generate_measure_candidates()
        if batch is None:
            return None
        keys = [key_of(candidate.sch) for candidate in batch]
        results = [ms.runner.RunnerResult([1e-3 * (1 + abs(key) % 97)], None) for key in keys]
        self.strategy.notify_runner_results(batch, results)
        self.model.update(self.context, batch, results)
        return keys


@pytest.fixture
def make_task(tmp_path):
    def make(lanes=None, **options):
        return LaneTask(lanes, tmp_path, **options)

    return make
