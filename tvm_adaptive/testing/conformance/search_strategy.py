"""Rules for every search strategy, by MetaSchedule's interface, on a product of matrices.

Nothing is built or run: the times of candidates are made up.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tvm_adaptive._tvm import (
    RunnerResult,
    Schedule,
    Target,
    TuneContext,
    TuningRecord,
    args_info_of,
    backends_of,
    handle,
    memory_database,
    module_key,
    only_intrinsics,
)
from tvm_adaptive._tvm.products import matrix_product
from tvm_adaptive.cost_model import RFEICostModel
from tvm_adaptive.testing.conformance.raising import must_not_raise
from tvm_adaptive.values.trial import Trial

MakeStrategy = Callable[[], Any]  # a fresh one each time
NewRun: TypeAlias = "Callable[..., _Run]"

# Extents of the matrices: far more programs than trials; another task, for a clone; and a task
# of four programs, fewer than its trials.
_SIZE, _OTHER_SIZE, _TINY_SIZE = 64, 32, 1
# Two full batches and part of a third, which AdaptiveSearch is the first to search for.
_BATCH = 8
_N_TRIALS = 20
# Stock ends a task after five in a row.
_MAX_EMPTY = 20
# One candidate in so many fails; 1 for all.
_SOME_FAIL, _ALL_FAIL = 4, 1
# Of any machine, so that the same seed gives the same candidates everywhere.
_TARGET = {"kind": "llvm", "num-cores": 2}


def check_search_strategy(
    make_strategy: MakeStrategy, *, seed: int = 1, may_repeat: bool = False
) -> None:
    """Run all checks of a search strategy.

    Parameters
    ----------
    make_strategy : callable
        Returns a fresh strategy each time, which shares nothing with the ones before.
    seed : int, default 1
        Of the tasks, in [1, 2^31 - 1).
    may_repeat : bool, default False
        Whether a program may be a candidate twice. Those of ``"replay-trace"`` and
        ``"replay-func"`` may: they draw with replacement.

    Raises
    ------
    AssertionError
        With the rule, and what the strategy did.
    """
    new_run = functools.partial(_Run, seed=seed, may_repeat=may_repeat)
    with only_intrinsics(backends_of([Target(_TARGET)])):
        first = new_run(make_strategy())
        first.finish()
        assert first.keys, "the strategy gave no candidate of a task of many programs"
        check_same_seed(make_strategy, new_run, first.keys)
        check_clone(make_strategy, new_run, len(first.keys))
        new_run(make_strategy(), fails_each=_ALL_FAIL, when="after failures only, ").finish()
        new_run(make_strategy(), size=_TINY_SIZE, when="with few programs, ").finish()
        again = new_run(first.strategy, when="after post_tuning(), ")
        again.finish()
        assert again.keys, "after post_tuning() and pre_tuning(), the strategy gave no candidate"


def check_same_seed(make_strategy: MakeStrategy, new_run: NewRun, keys: Sequence[int]) -> None:
    """Require the same candidates for the same seed, also of a clone: one thread makes them."""
    fresh = make_strategy()
    clone = _clone_of(fresh, "that was not started")
    for strategy, what in ((fresh, "the same seed"), (clone, "a clone and the same seed")):
        run = new_run(strategy)
        run.finish()
        assert run.keys == keys, f"{what} led to other candidates"


def check_clone(make_strategy: MakeStrategy, new_run: NewRun, n_alone: int) -> None:
    """Require that a clone of a strategy at work is a strategy of its own, not started.

    What they may share is knowledge: a transfer pool, a journal.
    """
    run = new_run(make_strategy())
    run.play_batch()
    clone = _clone_of(run.strategy, "at work")
    assert handle(clone) != handle(run.strategy), "clone() returned the strategy itself"
    early = None
    with contextlib.suppress(Exception):  # to refuse is right, too
        early = clone.generate_measure_candidates()
    assert not early, "a clone that was not started gave candidates"
    other = new_run(clone, size=_OTHER_SIZE, when="as a clone, ")
    other.finish()
    assert other.keys, "a clone of a strategy at work gave no candidate"
    run.finish()
    assert len(run.keys) == n_alone, (
        f"the strategy gave {len(run.keys)} candidates beside a clone, {n_alone} alone"
    )


def _clone_of(strategy: Any, which: str) -> Any:
    with must_not_raise(f"clone() of a strategy {which}"):
        clone = strategy.clone()
    assert clone is not None, f"clone() returned None for a strategy {which}"
    return clone


class _Run:
    """One task under a strategy; every batch is checked, and measured by made-up times."""

    def __init__(
        self,
        strategy: Any,
        *,
        seed: int,
        may_repeat: bool,
        size: int = _SIZE,
        fails_each: int = _SOME_FAIL,
        when: str = "",
    ) -> None:
        self.keys: list[int] = []  # of all candidates, in their order
        self._fails_each = fails_each
        self._may_repeat = may_repeat
        self._when = when
        self._model = RFEICostModel(n_trees=8, seed=seed, n_jobs=1)
        self._database = memory_database()
        with must_not_raise(f"{when}_initialize_with_tune_context()"):
            self.context = TuneContext(
                matrix_product(size),
                target=Target(_TARGET),
                space_generator="post-order-apply",
                search_strategy=strategy,
                task_name=f"product{size}",
                rand_state=seed,
                num_threads=1,
            )
        self.strategy = self.context.search_strategy
        spaces = self.context.generate_design_space()
        with must_not_raise(f"{when}pre_tuning()"):
            self.strategy.pre_tuning(_N_TRIALS, _BATCH, spaces, self._database, self._model)

    def finish(self) -> None:
        """Play until the strategy ends, and end it."""
        n_empty = 0
        while n_empty < _MAX_EMPTY:
            n_before = len(self.keys)
            if not self.play_batch():
                break
            n_empty = n_empty + 1 if len(self.keys) == n_before else 0
        assert n_empty < _MAX_EMPTY, (
            f"{self._when}the strategy gave {n_empty} empty batches in a row instead of None, "
            "which ends a task"
        )
        with must_not_raise(f"{self._when}post_tuning()"):
            self.strategy.post_tuning()

    def play_batch(self) -> bool:
        """Check and measure a batch; say whether there was one."""
        with must_not_raise(f"{self._when}generate_measure_candidates()"):
            batch = self.strategy.generate_measure_candidates()
        if batch is None:
            return False
        n_left = _N_TRIALS - len(self.keys)
        assert len(batch) <= _BATCH, (
            f"{self._when}the strategy was asked for {_BATCH} candidates at once and gave "
            f"{len(batch)}"
        )
        assert len(batch) <= n_left, (
            f"{self._when}the strategy was asked for {_N_TRIALS} candidates in all and gave "
            f"{len(self.keys) + len(batch)} or more"
        )
        for candidate in batch:
            self._check_candidate(candidate)
        self._measure(list(batch))
        return True

    def _check_candidate(self, candidate: Any) -> None:
        """Require a program of this task, as its trace makes it, that was no candidate before."""
        key = module_key(candidate.sch.mod)
        again = Schedule(self.context.mod)
        with must_not_raise(f"{self._when}the trace of a candidate, applied to its task,"):
            candidate.sch.trace.apply_to_schedule(again, remove_postproc=False)
        assert module_key(again.mod) == key, (
            f"{self._when}the trace of a candidate leads to another program than the candidate's"
        )
        given, expected = (
            [each.as_json() for each in infos]
            for infos in (candidate.args_info, args_info_of(candidate.sch.mod))
        )
        assert str(given) == str(expected), (
            f"{self._when}a candidate takes {expected}, but its args_info is {given}"
        )
        assert self._may_repeat or key not in self.keys, (
            f"{self._when}a program was a candidate twice (may_repeat=True allows it)"
        )
        self.keys.append(key)

    def _measure(self, batch: list[Any]) -> None:
        """Hand results over in the order of MetaSchedule's schedulers."""
        results = []
        failure = RunnerResult(None, "made to fail")
        for number, candidate in enumerate(batch):
            # Any time that follows from the program; between 1 and 97 ms.
            seconds = 1e-3 * (1 + module_key(candidate.sch.mod) % 97)
            is_failed = number % self._fails_each == 0
            results.append(failure if is_failed else RunnerResult([seconds], None))
        with must_not_raise(f"{self._when}notify_runner_results()"):
            self.strategy.notify_runner_results(batch, results)
        workload = self._database.commit_workload(self.context.mod)
        for candidate, result in zip(batch, results, strict=True):
            run_secs = Trial.of(result).recorded_secs
            record = (candidate.sch.trace, workload, run_secs, self.context.target)
            self._database.commit_tuning_record(TuningRecord(*record, candidate.args_info))
        self._model.update(self.context, batch, results)
