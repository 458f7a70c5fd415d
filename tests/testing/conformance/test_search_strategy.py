from collections import deque
from typing import ClassVar

import numpy as np
import pytest
from tvm.s_tir import meta_schedule as ms

from tvm_adaptive import AdaptiveSearch
from tvm_adaptive._tvm import (
    MeasureCandidate,
    Schedule,
    args_info_of,
    block_names,
    derived_object,
    module_key,
    te_workload,
)
from tvm_adaptive._tvm.products import matrix_product
from tvm_adaptive.search_strategy.stoppable import DelegatingSearch
from tvm_adaptive.testing.conformance import check_search_strategy

SMALL = {"population_size": 48, "genetic_num_iters": 1, "init_min_unmeasured": 8}


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdaptiveSearch(**SMALL),
        pytest.param(lambda: AdaptiveSearch(**SMALL, proposer="evolution"), marks=pytest.mark.slow),
        pytest.param(
            lambda: ms.search_strategy.EvolutionarySearch(**SMALL), marks=pytest.mark.slow
        ),
    ],
)
def test_searches_conform(make):
    check_search_strategy(make)


@pytest.mark.parametrize("name", ["replay-trace", "replay-func"])
def test_stocks_replays_conform_but_for_repeats(name):
    def make():
        return ms.SearchStrategy.create(name)

    check_search_strategy(make, may_repeat=True)
    with pytest.raises(AssertionError, match="with few programs, a program was a candidate twice"):
        check_search_strategy(make)


class Draws(DelegatingSearch):
    """Draws programs as stock does, and leaves out what it has drawn before."""

    def __init__(self):
        super().__init__(ms.SearchStrategy.create("replay-trace"))

    def pre_tuning(self, max_trials, num_trials_per_iter, *others):
        self.seen = set()
        super().pre_tuning(max_trials, num_trials_per_iter, *others)

    def generate_measure_candidates(self):
        batch = super().generate_measure_candidates()
        if batch is None:
            return None
        new = {module_key(each.sch.mod): each for each in batch}
        fresh = [each for key, each in new.items() if key not in self.seen]
        self.seen.update(new)
        return fresh

    def clone(self):
        return derived_object(type(self))()


def test_a_search_without_repeats_conforms():
    check_search_strategy(derived_object(Draws))


class Edited(Draws):
    """Changes each batch."""

    def generate_measure_candidates(self):
        batch = super().generate_measure_candidates()
        return batch if batch is None else self.edited(batch)


class Double(Draws):
    """Gives twice as many at once."""

    def pre_tuning(self, max_trials, num_trials_per_iter, *others):
        super().pre_tuning(max_trials, 2 * num_trials_per_iter, *others)


class Endless(Draws):
    """Does not count its trials."""

    def pre_tuning(self, max_trials, num_trials_per_iter, *others):
        super().pre_tuning(1000, num_trials_per_iter, *others)


class Same(Edited):
    """Gives one candidate as a whole batch."""

    def edited(self, batch):
        return batch[:1] * len(batch)


class OtherTask(Edited):
    """Gives programs of another task."""

    def edited(self, batch):
        schedule = Schedule(matrix_product(16))
        return [MeasureCandidate(schedule, args_info_of(schedule.mod))]


class OtherBlocks(Edited):
    """Gives traces that work on another task's blocks."""

    def edited(self, batch):
        mod = te_workload("SFM")
        schedule = Schedule(mod)
        schedule.get_sblock(block_names(mod)[0])
        return [MeasureCandidate(schedule, args_info_of(schedule.mod))]


class NoArguments(Edited):
    """Forgets what candidates take."""

    def edited(self, batch):
        return [MeasureCandidate(each.sch, []) for each in batch]


class Schedules(Edited):
    """Gives schedules instead of candidates."""

    def edited(self, batch):
        return [each.sch for each in batch]


class Nothing(Draws):
    """Gives empty batches instead of an end."""

    def generate_measure_candidates(self):
        return []


class Ended(Draws):
    """Ends before it begins."""

    def generate_measure_candidates(self):
        return None


class Dice(Edited):
    """Shuffles with dice of its own."""

    dice = np.random.default_rng(0)

    def edited(self, batch):
        return [batch[i] for i in self.dice.permutation(len(batch))]


class Hopeful(Draws):
    """Needs a success."""

    def notify_runner_results(self, measure_candidates, results):
        super().notify_runner_results(measure_candidates, results)
        if results:
            min(float(each.run_secs[0]) for each in results if each.run_secs is not None)


class Unfinished(Draws):
    """Has no clone."""

    def clone(self):
        raise NotImplementedError


class Single(Draws):
    """Is its own clone."""

    def clone(self):
        return self.wrapper


def single():
    made = derived_object(Single)()
    made._inst.wrapper = made
    return made


class Childless(Draws):
    """Has nothing to return."""

    def clone(self):
        return None


class Forgetful(Edited):
    """Loses an option as a clone."""

    def __init__(self, is_reversed=True):
        super().__init__()
        self.is_reversed = is_reversed

    def edited(self, batch):
        return batch[::-1] if self.is_reversed else batch

    def clone(self):
        return derived_object(Forgetful)(False)


class Sharing(Draws):
    """Shares its work with its clones."""

    def clone(self):
        cloned = derived_object(Sharing)()
        cloned._inst.inner = self.inner
        cloned._inst.seen = set()
        return cloned


class Counting(Draws):
    """Shares its number of trials with its clones."""

    sent: ClassVar = deque()

    def pre_tuning(self, *args):
        self.sent.clear()
        super().pre_tuning(*args)

    def generate_measure_candidates(self):
        batch = super().generate_measure_candidates() if len(self.sent) < 20 else None
        self.sent.extend(batch or [])
        return batch


class Once(Draws):
    """Cannot start again."""

    is_over = False

    def generate_measure_candidates(self):
        return None if self.is_over else super().generate_measure_candidates()

    def post_tuning(self):
        self.is_over = True
        super().post_tuning()


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Double, "asked for 8 candidates at once and gave 16"),
        (Endless, "asked for 20 candidates in all and gave 24 or more"),
        (Same, "a program was a candidate twice"),
        (OtherTask, "leads to another program than the candidate's"),
        (OtherBlocks, "the trace of a candidate, applied to its task, raised"),
        (NoArguments, r"a candidate takes .*float32.*, but its args_info is \[\]"),
        (Schedules, r"generate_measure_candidates\(\) raised TypeError"),
        (Nothing, "gave 20 empty batches in a row instead of None"),
        (Ended, "gave no candidate of a task of many programs"),
        (Dice, "the same seed led to other candidates"),
        (Hopeful, r"after failures only, notify_runner_results\(\) raised ValueError"),
        (Unfinished, r"clone\(\) of a strategy that was not started raised RuntimeError"),
        (Childless, r"clone\(\) returned None"),
        (single, r"clone\(\) returned the strategy itself"),
        (Forgetful, "a clone and the same seed led to other candidates"),
        (Sharing, "a clone that was not started gave candidates"),
        (Counting, "gave 8 candidates beside a clone, 20 alone"),
        (Once, r"after post_tuning\(\) and pre_tuning\(\), the strategy gave no candidate"),
    ],
)
def test_what_does_not_conform_is_named(kind, match):
    with pytest.raises(AssertionError, match=match):
        check_search_strategy(derived_object(kind) if isinstance(kind, type) else kind)
