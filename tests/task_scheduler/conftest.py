"""A run of MetaSchedule that is real except for builder, runner and clock."""

import pytest
import tvm
from tvm import te
from tvm.s_tir import meta_schedule as ms

from tests.journals import MemoryJournal
from tvm_adaptive._tvm import (
    BuilderResult,
    PyBuilder,
    PyMeasureCallback,
    PyRunner,
    PyRunnerFuture,
    RunnerResult,
    args_info_of,
    derived_object,
)
from tvm_adaptive.task_scheduler.arms import Decision
from tvm_adaptive.tuning.target import resolve_target


class Clock:
    """Seconds that pass only when somebody lets them."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Turns:
    """A policy: the live arms in turn."""

    def __init__(self, n_trials=None):
        self.n_trials = n_trials
        self.at = -1
        self.seen = []

    def reset(self):
        self.at = -1
        self.seen = []

    def choose(self, arms, rng):
        self.seen.append(arms)
        for _ in arms:
            self.at = (self.at + 1) % len(arms)
            if not arms[self.at].finished:
                return Decision(self.at, "turn", n_trials=self.n_trials)
        return Decision(None, "nothing-left")


class Script:
    """A policy that reads its decisions off a list, then ends the run."""

    def __init__(self, decisions):
        self.decisions = list(decisions)
        self.seen = []

    def reset(self):
        self.seen = []

    def choose(self, arms, rng):
        self.seen.append(arms)
        decision = self.decisions.pop(0) if self.decisions else Decision(None, "done")
        if isinstance(decision, Exception):
            raise decision
        return decision if isinstance(decision, Decision) else Decision(decision, "script")


@derived_object
class FakeBuilder(PyBuilder):
    """Builds nothing; names each artifact by its task's size."""

    def __init__(self, broken=()):
        super().__init__()
        self.broken = set(broken)
        self.sizes = []

    def build(self, build_inputs):
        sizes = [size_of(each.mod) for each in build_inputs]
        self.sizes.append(sizes)
        return [
            BuilderResult(None, "made to fail")
            if size in self.broken
            else BuilderResult(f"made-up-{size}", None)
            for size in sizes
        ]


@derived_object
class FakeFuture(PyRunnerFuture):
    def __init__(self, result):
        super().__init__()
        self._result = result

    def done(self):
        return True

    def result(self):
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


@derived_object
class LateFuture(PyRunnerFuture):
    """Is measured only when somebody asks for the result, and notes that."""

    def __init__(self, measure, note):
        super().__init__()
        self._measure = measure
        self._note = note
        self._future = None

    def done(self):
        return self._future is not None

    def result(self):
        self._note()
        self._future = self._measure()
        return self._future.result()


@derived_object
class FakeRunner(PyRunner):
    """Tells milliseconds by a rule of size and trial number; each trial takes a second.

    ``is_late``: only when it is asked for them. ``log`` says in which order batches came
    and results were asked for.
    """

    def __init__(self, clock, latency_ms, is_late=False):
        super().__init__()
        self.clock = clock
        self.latency_ms = latency_ms
        self.is_late = is_late
        self.counts = {}
        self.log = []

    def run(self, runner_inputs):
        sizes = [int(each.artifact_path.rsplit("-")[-1]) for each in runner_inputs]
        if sizes:
            self._note("run", sizes[0])
        return [self._late(size) if self.is_late else self._one(size) for size in sizes]

    def _late(self, size):
        return LateFuture(lambda: self._one(size), lambda: self._note("result", size))

    def _note(self, what, size):
        if self.log[-1:] != [(what, size)]:
            self.log.append((what, size))

    def _one(self, size):
        number = self.counts[size] = self.counts.get(size, 0) + 1
        self.clock.now += 1.0
        outcome = self.latency_ms(size, number)
        if isinstance(outcome, Exception):
            return FakeFuture(outcome)
        if outcome is None:
            return FakeFuture(RunnerResult(None, "made to fail"))
        return FakeFuture(RunnerResult([outcome * 1e-3], None))


@derived_object
class FakeCallback(PyMeasureCallback):
    """Notes (task, number of results); raises for the tasks it was given."""

    def __init__(self, raises_for=()):
        super().__init__()
        self.raises_for = set(raises_for)
        self.rounds = []

    def apply(self, scheduler, task_id, candidates, builder_results, runner_results):
        if task_id in self.raises_for:
            raise ValueError("a callback's own fault")
        self.rounds.append((task_id, len(runner_results)))


def size_of(mod):
    return int(args_info_of(mod)[0].shape[0])


def matmul(size):
    a = te.placeholder((size, 16), name="a")
    b = te.placeholder((16, 16), name="b")
    k = te.reduce_axis((0, 16), name="k")
    c = te.compute((size, 16), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    return tvm.IRModule({"main": te.create_prim_func([a, b, c])})


class World:
    """Some matmuls of 16 columns that differ in their rows, and everything to tune them."""

    def __init__(self):
        self.clock = Clock()
        self.journal = MemoryJournal()
        self.builder = FakeBuilder()
        self.callback = FakeCallback()
        self.database = ms.database.MemoryDatabase()
        self.latency_ms = lambda size, number: size / number
        self.is_late = False
        self.contexts = []

    def tune(
        self,
        scheduler,
        *,
        sizes=(16, 32, 64),
        strategy="replay-trace",
        trials=1000,
        per_task=None,
        batch=8,
        seed=1,
    ):
        self.contexts = [
            ms.TuneContext(
                matmul(size),
                target=resolve_target("cpu"),
                space_generator="post-order-apply",
                search_strategy=strategy if isinstance(strategy, str) else strategy.clone(),
                task_name=f"matmul{size}",
                rand_state=seed,
                num_threads=1,
            )
            for size in sizes
        ]
        self.runner = FakeRunner(self.clock, self.latency_ms, self.is_late)
        ms.tune.tune_tasks(
            tasks=self.contexts,
            task_weights=[1.0 + k for k in range(len(sizes))],
            work_dir="",
            max_trials_global=trials,
            max_trials_per_task=per_task,
            num_trials_per_iter=batch,
            builder=self.builder,
            runner=self.runner,
            database=self.database,
            cost_model="random",
            measure_callbacks=[ms.measure_callback.AddToDatabase(), self.callback],
            task_scheduler=scheduler,
        )

    @property
    def played(self):
        """Indices of the tasks in the order their batches were sent to the builder."""
        sizes = [size_of(context.mod) for context in self.contexts]
        return [sizes.index(batch[0]) for batch in self.builder.sizes if batch]

    @property
    def batches(self):
        return [len(batch) for batch in self.builder.sizes]


@pytest.fixture
def world():
    return World()


@pytest.fixture
def turns():
    return Turns


@pytest.fixture
def script():
    return Script
