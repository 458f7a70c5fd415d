import zlib

import pytest
import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.testing.te_workload import create_te_workload

from tvm_adaptive._tvm import python_side
from tvm_adaptive.tuning.target import resolve_target


def context_of(name, strategy=None, *, seed=7, num_threads=1, shape=0, mod=None):
    return ms.TuneContext(
        mod or tvm.IRModule({"main": create_te_workload(name, shape)}),
        target=resolve_target("cpu"),
        space_generator="post-order-apply",
        search_strategy=strategy,
        task_name=f"{name.lower()}{shape or ''}",
        rand_state=seed,
        num_threads=num_threads,
    )


class Task:
    """A small task with everything that a search needs, and results made up by a rule."""

    def __init__(
        self,
        strategy,
        cost_model,
        *,
        seed=7,
        database=None,
        batch=16,
        max_trials=1000,
        shape=0,
        mod=None,
    ):
        self.context = context_of("GMM", strategy, seed=seed, shape=shape, mod=mod)
        self.mod = self.context.mod
        # An empty database is false.
        self.database = ms.database.MemoryDatabase() if database is None else database
        self.cost_model = cost_model
        self.strategy = self.context.search_strategy
        self.strategy.pre_tuning(
            max_trials,
            batch,
            self.context.generate_design_space(),
            self.database,
            self.cost_model,
        )

    def round(self, fail=lambda number: False):
        """Run one round with made-up times; commit them as MetaSchedule's callback does."""
        batch = self.strategy.generate_measure_candidates()
        if batch is None:
            return None
        workload = self.database.commit_workload(self.mod)
        results = []
        for number, candidate in enumerate(batch):
            if fail(number):
                results.append(ms.runner.RunnerResult(None, "made to fail"))
                seconds = [1e10]
            else:
                # The same in each process, as hashes of strings are not.
                checksum = zlib.crc32(str(candidate.sch.trace).encode())
                seconds = [1e-3 * (1 + checksum % 97)]
                results.append(ms.runner.RunnerResult(seconds, None))
            record = ms.database.TuningRecord(
                candidate.sch.trace, workload, seconds, self.context.target, candidate.args_info
            )
            self.database.commit_tuning_record(record)
        self.strategy.notify_runner_results(batch, results)
        self.cost_model.update(self.context, batch, results)
        return batch

    @property
    def proposer(self):
        return python_side(self.strategy).state.proposer


@pytest.fixture(scope="session")
def make_context():
    return context_of


@pytest.fixture
def make_task():
    return Task
