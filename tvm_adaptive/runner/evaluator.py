"""Measure one candidate in micro-batches until a stopping rule is satisfied.

Timer and clock are arguments, so that nothing here needs TVM or a device.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from tvm_adaptive.errors import AdaptiveError
from tvm_adaptive.runner.stopping import StoppingRule, looks
from tvm_adaptive.runner.summary import summarize
from tvm_adaptive.values.noise import PRIOR_ERROR
from tvm_adaptive.values.trial import FloatArray, Timing

# Long against a timer's resolution and a scheduler tick; three of them cost a twentieth
# of stock's 100 ms minimum.
BATCH_MS = 2.0
# The least that stock spends on a candidate. Beyond the rule's minimum, never spend more.
PRECISION_MAX_SEC = 0.1
# Before a kernel has run this long, threads wake up, clocks rise and caches fill: short
# kernels look slower, and all their micro-batches alike, so that no rule notices.
WARM_UP_SEC = 0.005
# Rules with a fixed number of runs exist to compare with published tables, so their cap is
# only a guard: 500 runs of a kernel of 10 ms.
FIXED_MAX_SEC = 5.0
# One run this long averages over hundreds of scheduler ticks, and such a candidate is
# either hopeless or of an operator whose every further run is expensive.
SLOW_RUN_SEC = 0.1
# Only an interrupted first run overestimates the time by this much. The micro-batches are
# then much too short and are chosen again, once.
MISJUDGED_FACTOR = 4.0
# The loop count of TVM's timer is a C int.
MAX_RUNS_PER_BATCH = 2**31 - 1
RACED = "raced"
# One run is enough to see it.
HOPELESS_FACTOR = 3.0
# Standard deviations of the machine's noise: 1.27 x at 4 %, 1.43 x at 6 %. Timings have long tails:
# with recorded noise, 2.5 to 2.7 % of candidates that are 5 % faster are dropped, with 5 deviations
# 3.2 to 4.1 % (``benchmarks/micro/race_simulation.py``).
_BEHIND_SIGMAS = 6.0

# ``timer(number, repeat)`` returns ``repeat`` means of ``number`` runs each, in seconds; a call
# may pay one run of warm-up that does not count.
Timer = Callable[[int, int], Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Race:
    """A race against the fastest known candidate of the task; who clearly loses, stops early.

    The host of a virtual machine can slow a kernel down, never speed it up. So the fastest
    micro-batch bounds a kernel's time better than an interval around the mean. A better
    candidate is lost only if all its micro-batches were disturbed, which would spoil a full
    measurement as well. Racing: Maron and Moore, "Hoeffding Races", NeurIPS 1993; the bound
    by the minimum: Chen and Revels, "Robust benchmarking in noisy environments", 2016.
    """

    incumbent_sec: float  # of one run
    noise: float = PRIOR_ERROR  # relative standard deviation of a timing, a moment later

    @property
    def behind_factor(self) -> float:
        """How many times as long as the incumbent a candidate takes that has lost."""
        return math.exp(_BEHIND_SIGMAS * self.noise)

    def is_hopeless(self, run_sec: float) -> bool:
        """Say whether to stop after one run, or one micro-batch, of a warm kernel."""
        # Where noise is large, one look must not decide what three would not.
        return run_sec >= max(HOPELESS_FACTOR, self.behind_factor) * self.incumbent_sec

    def is_behind(self, batch_means_sec: FloatArray) -> bool:
        """Say whether to stop after micro-batches, shape (i,), seconds."""
        return float(batch_means_sec.min()) >= self.behind_factor * self.incumbent_sec


def evaluate(
    timer: Timer,
    rule: StoppingRule,
    *,
    min_repeat_ms: float = 0.0,
    max_sec: float | None = None,
    single_runs: bool = False,
    race: Race | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Measure a candidate.

    One run, then a warm-up unless the rule fixes its runs, then the rule's minimum of
    micro-batches in one call of the timer, then more until the rule stops. Ends earlier if
    the first run is too long (reason ``"slow"``), if the next micro-batches do not fit into
    ``max_sec`` (``"out-of-time"``), or if the candidate clearly loses its race (``"raced"``);
    rules that fix their runs are published algorithms and do not race.
    """
    start = clock()
    if max_sec is None:
        max_sec = PRECISION_MAX_SEC if rule.runs_per_batch is None else FIXED_MAX_SEC
    run_sec = _times_of(timer, 1, 1)[0]
    if run_sec >= min(SLOW_RUN_SEC, max_sec / rule.min_batches):
        return Timing(run_sec, math.nan, 1, 1, "slow", clock() - start)
    adjustable = rule.runs_per_batch is None and not single_runs
    race = race if adjustable else None
    warm = not adjustable or run_sec >= WARM_UP_SEC
    n_runs = 1 if warm else min(int(WARM_UP_SEC / run_sec), MAX_RUNS_PER_BATCH)
    if not warm:
        run_sec = _times_of(timer, n_runs, 1)[0]
    if race is not None and race.is_hopeless(run_sec):
        return Timing(run_sec, math.nan, n_runs, 1, RACED, clock() - start)
    number = 1 if single_runs else _choose_number(run_sec, rule, min_repeat_ms, max_sec)
    # The first run counts as a micro-batch only if they are all single runs, and others follow.
    batches = [run_sec] if number == 1 and warm and rule.min_batches > 1 else []
    while True:
        wanted = next(n for n in looks(rule) if n > len(batches)) - len(batches)
        if len(batches) >= rule.min_batches:
            left_sec = max_sec - (clock() - start)
            # Each call of the timer makes one run of warm-up.
            wanted = min(wanted, int((left_sec - run_sec) / (run_sec * number)))
            if wanted < 1:
                reason = "out-of-time"
                break
        batches += _times_of(timer, number, wanted)
        if adjustable:
            adjustable = False
            run_sec = float(np.median(batches))
            fitting = _choose_number(run_sec, rule, min_repeat_ms, max_sec)
            if fitting > MISJUDGED_FACTOR * number:
                number, batches = fitting, []
                continue
        reason = _stop_reason(rule, race, np.array(batches))
        if reason:
            break
    summary = summarize(np.array(batches))
    return Timing(
        mean_sec=summary.mean_sec,
        stderr_sec=summary.stderr_sec,
        n_runs=number * summary.n_batches,
        n_batches=summary.n_batches,
        reason=reason,
        elapsed_sec=clock() - start,
    )


def _stop_reason(rule: StoppingRule, race: Race | None, batches: FloatArray) -> str:
    """Return why to stop, or an empty string."""
    if race is not None and race.is_behind(batches):
        return RACED
    decision = rule.decide(batches)
    return decision.reason if decision.stop or len(batches) >= rule.max_batches else ""


def _choose_number(run_sec: float, rule: StoppingRule, min_repeat_ms: float, max_sec: float) -> int:
    if rule.runs_per_batch is None:
        number = math.ceil(BATCH_MS / 1e3 / run_sec)
    else:
        # As many of the rule's own runs as fit into the cap.
        number = min(rule.runs_per_batch, int(max_sec / (rule.min_batches * run_sec)))
    least_sec = min_repeat_ms / 1e3 / rule.max_batches
    return min(max(1, number, math.ceil(least_sec / run_sec)), MAX_RUNS_PER_BATCH)


def _times_of(timer: Timer, number: int, repeat: int) -> list[float]:
    times = [float(value) for value in timer(number, repeat)]
    if len(times) != repeat:
        raise AdaptiveError(
            f"The timer was asked for {repeat} micro-batches and returned {len(times)} times; "
            "the measurement cannot be trusted."
        )
    wrong = [value for value in times if not (math.isfinite(value) and value > 0.0)]
    if wrong:
        raise AdaptiveError(
            f"The timer returned {wrong[0]} s for a run, but a time is finite and positive; "
            "the kernel did not run or the device's clock is broken. The candidate counts "
            "as failed."
        )
    return times
