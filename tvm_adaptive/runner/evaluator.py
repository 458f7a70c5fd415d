"""Measure one candidate in micro-batches until a stopping rule is content.

The timer is handed in, so that nothing here knows of TVM, of a device or of a clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from tvm_adaptive.errors import AdaptiveError
from tvm_adaptive.runner.racing import RACED, Race
from tvm_adaptive.runner.stopping import StoppingRule, looks
from tvm_adaptive.runner.summary import summarize
from tvm_adaptive.values.trial import FloatArray, Timing

# Long against a timer's resolution and one scheduler tick of noise, short enough that
# three of them cost a twentieth of stock's 100 ms minimum.
BATCH_MS = 2.0
# What stock spends at the least on any candidate: past the minimum, never more than it.
PRECISION_MAX_SEC = 0.1
# Until a kernel has run this long, threads that sleep have to be woken, clocks rise and
# caches fill: short kernels look slower, all of them alike, so that no rule notices.
WARM_UP_SEC = 0.005
# Rules with a fixed number of runs are there to compare with the published tables, so
# their cap is only a guard: 500 runs of a kernel of 10 ms.
FIXED_MAX_SEC = 5.0
# One run this long averages over hundreds of scheduler ticks by itself, and such a
# candidate is either hopeless or of an operator where every further run is dear.
SLOW_RUN_SEC = 0.1
# Only a first run that was interrupted overrates the kernel by this much; then the
# micro-batches are much too short and are chosen again, once.
MISJUDGED_FACTOR = 4.0
# The loop count of TVM's timer is a C int.
MAX_RUNS_PER_BATCH = 2**31 - 1


class Timer(Protocol):
    """``timer(number, repeat)`` returns ``repeat`` means of ``number`` runs, in seconds.

    Each call may pay one run of warm-up that does not count.
    """

    def __call__(self, number: int, repeat: int) -> Sequence[float]:
        """Run the kernel ``number * repeat`` times; return shape (repeat,), seconds."""


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

    A first single run tells how long a run takes. Unless the rule fixes its runs, the
    kernel then runs for 5 ms that do not count. A candidate so slow that the rule's
    minimum does not fit into ``max_sec``, or whose run takes 0.1 s or more, ends there
    (reason ``"slow"``): a warm-up and one long run. Otherwise the number of runs per
    micro-batch is chosen once (2 ms worth of them, or the rule's own number), the
    rule's minimum is measured in one call of the timer, then the rule is asked, and so
    on until it stops or the next micro-batch does not fit into ``max_sec`` (reason
    ``"out-of-time"``, never before the rule's minimum).

    A candidate that clearly loses its race ends before (reason ``"raced"``): after one
    run of 5 ms or more, after the 5 ms of warm-up, or after the rule's minimum. A rule
    that fixes its runs is published as it is and knows no races.
    """
    start = clock()
    if max_sec is None:
        max_sec = PRECISION_MAX_SEC if rule.runs_per_batch is None else FIXED_MAX_SEC
    run_sec = _ask(timer, 1, 1)[0]
    if run_sec >= min(SLOW_RUN_SEC, max_sec / rule.min_batches):
        return Timing(run_sec, math.nan, 1, 1, "slow", clock() - start)
    adjustable = rule.runs_per_batch is None and not single_runs
    race = race if adjustable else None
    warm = not adjustable or run_sec >= WARM_UP_SEC
    n_runs = 1 if warm else min(int(WARM_UP_SEC / run_sec), MAX_RUNS_PER_BATCH)
    if not warm:
        run_sec = _ask(timer, n_runs, 1)[0]
    if race is not None and race.is_hopeless(run_sec):
        return Timing(run_sec, math.nan, n_runs, 1, RACED, clock() - start)
    number = 1 if single_runs else _choose_number(run_sec, rule, min_repeat_ms, max_sec)
    # The first run is a micro-batch like the others only if they are single runs, too.
    batches = [run_sec] if number == 1 and warm else []
    while True:
        wanted = _next_look(rule, len(batches)) - len(batches)
        if len(batches) >= rule.min_batches:
            left_sec = max_sec - (clock() - start)
            # Each call of the timer pays one run of warm-up.
            wanted = min(wanted, int((left_sec - run_sec) / (run_sec * number)))
            if wanted < 1:
                reason = "out-of-time"
                break
        batches += _ask(timer, number, wanted)
        if adjustable:
            adjustable = False
            run_sec = float(np.median(batches))
            fitting = _choose_number(run_sec, rule, min_repeat_ms, max_sec)
            if fitting > MISJUDGED_FACTOR * number:
                number, batches = fitting, []
                continue
        reason = _verdict(rule, race, np.array(batches))
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


def _verdict(rule: StoppingRule, race: Race | None, batches: FloatArray) -> str:
    """Return why measuring ends, or an empty string while it goes on."""
    if race is not None and race.is_behind(batches):
        return RACED
    decision = rule.decide(batches)
    return decision.reason if decision.stop or len(batches) >= rule.max_batches else ""


def _next_look(rule: StoppingRule, n_batches: int) -> int:
    return next(count for count in looks(rule) if count > n_batches)


def _choose_number(run_sec: float, rule: StoppingRule, min_repeat_ms: float, max_sec: float) -> int:
    # The first run alone lasts long enough, or the rule's own number of runs does not fit
    # into the cap: then as many as do.
    if rule.runs_per_batch is None:
        number = math.ceil(BATCH_MS / 1e3 / run_sec)
    else:
        number = min(rule.runs_per_batch, int(max_sec / (rule.min_batches * run_sec)))
    least_sec = min_repeat_ms / 1e3 / rule.max_batches
    return min(max(1, number, math.ceil(least_sec / run_sec)), MAX_RUNS_PER_BATCH)


def _ask(timer: Timer, number: int, repeat: int) -> list[float]:
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
