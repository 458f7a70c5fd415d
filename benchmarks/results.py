"""From runs to comparisons with the baseline, all by what was timed anew. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from benchmarks.entries import BASELINE, COPY, TOP, cut_of, ranked
from benchmarks.journals import FINAL, Bench, Incumbent, Rounds, Run, median_of
from benchmarks.scaled_curves import scaled_speed_up
from benchmarks.stats import (
    Interval,
    Paired,
    Spread,
    exactly,
    first_within,
    geometric_mean_interval,
    paired,
    spread,
)
from benchmarks.workloads import WORKLOADS

# Whoever is that close to the baseline's end counts as being there: about what one and the same
# kernel differs by between two hours.
TOLERANCE = 0.03
TIME, TRIALS = "time to q", "trials to q"
EQUAL_TIME, EQUAL_TRIALS = "equal time", "equal trials"
FIGURES = (TIME, TRIALS, EQUAL_TIME, EQUAL_TRIALS)
# The ratio of a baseline's latency to that of a run that found nothing.
_NOTHING = Interval(0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A method against the baseline on one workload; all above 1 is better than it.

    Attributes
    ----------
    workload, method : str
    n_pairs : int
        Seeds that both have and of which the baseline found something.
    figures : dict of str to Spread or None
        ``"time to q"`` and ``"trials to q"``: the baseline's seconds (trials) to its own final
        quality over the method's. ``"equal time"``: the baseline's latency over the method's
        when the shorter of the two runs was done, as ratios within rounds. ``"equal trials"``:
        after as many trials.
    noise : float
        The largest ratio, less one, between one library and its copy in the same rounds; nan
        if there was none.
    timed : tuple of int
        Incumbents that were timed anew, and all of them.
    scaled : float or None
        Time to the baseline's final quality as the estimator of earlier tables reads it.
    """

    workload: str
    method: str
    n_pairs: int
    figures: dict[str, Spread | None]
    noise: float
    timed: tuple[int, int]
    scaled: float | None

    def is_noise(self, figure: str) -> bool:
        """Say whether a ratio of latencies is no larger than that of a library to its copy."""
        found = self.figures[figure]
        if found is None or figure not in (EQUAL_TIME, EQUAL_TRIALS) or found.median.low <= 0:
            return False
        return abs(math.log(found.median.low)) <= math.log1p(self.noise) and found.median.is_exact


def comparisons(bench: Bench, baseline: str = BASELINE) -> list[Comparison]:
    """Return one comparison per workload and method that shares seeds with the baseline."""
    found = []
    for workload in bench.workloads:
        for method in bench.methods:
            pairs = list(pairs_of(bench, workload, method, baseline))
            if method != baseline and pairs:
                found.append(_compare(bench, workload, method, pairs))
    return found


def pairs_of(bench: Bench, workload: str, method: str, baseline: str) -> Iterator[tuple[Run, Run]]:
    """Yield the baseline's run and the method's, also one that failed, for each seed of both."""
    bases = {run.spec.seed: run for run in bench.of(workload, baseline)}
    for run in bench.runs:
        is_method = (run.spec.workload, run.spec.method) == (workload, method)
        if is_method and run.spec.seed in bases:
            yield bases[run.spec.seed], run


def overall(found: Sequence[Comparison], method: str) -> dict[str, tuple[Interval, Interval, str]]:
    """Return geometric mean, worst and the worst's workload of a method over workloads.

    Returns
    -------
    dict of str to (Interval, Interval, str)
        By figures; without those that no workload has. A mean is a bound as soon as one
        workload's median is one.
    """
    columns: dict[str, list[tuple[Interval, str]]] = {}
    for each in found:
        for name, value in each.figures.items():
            if each.method == method and value is not None:
                columns.setdefault(name, []).append((value.median, each.workload))
    return {
        name: (
            geometric_mean_interval([value for value, _ in values]),
            *min(values, key=lambda each: (each[0].low, each[0].high)),
        )
        for name, values in columns.items()
    }


def losses(found: Sequence[Comparison]) -> list[tuple[str, str, str, Spread]]:
    """Return (method, workload, figure, value) of medians below 1 and of runs that never got there.

    Medians within the noise are left out.
    """
    return [
        (each.method, each.workload, name, value)
        for each in found
        for name, value in each.figures.items()
        if value is not None
        and (value.n_never or (value.median.high < 1.0 and not each.is_noise(name)))
    ]


def noise_of(timed: Mapping[str, Rounds]) -> float:
    """Return the largest ratio, less one, between one library and its copy; nan of none."""
    found = [
        paired(timed[name.removesuffix(f"-{COPY}")], rounds) for name, rounds in _copies(timed)
    ]
    ratios = [abs(math.log(each.value)) for each in found if each is not None]
    return math.expm1(max(ratios)) if ratios else math.nan


def anew(bench: Bench, run: Run, cut: str | None) -> Rounds:
    """Return the rounds of what a run would have given at a cut; empty where not timed.

    The run's own winner at its end if it chose that by a play-off. Everywhere else the best of
    its record and of the next best, by their medians of all rounds: luck does not set it.
    """
    if cut is None:
        return {}
    own = cut == FINAL and run.has_playoff
    n_trials = run.n_trials if cut == FINAL else int(cut)
    found = [bench.rounds_of(run, cut) if cut == FINAL else _of_incumbent(bench, run, n_trials)]
    if not own and WORKLOADS[run.spec.workload].is_network:  # a record of each task at once
        before = [each.n_trials for each in run.incumbents if each.n_trials <= n_trials]
        found += [_of_incumbent(bench, run, each) for each in before[-TOP:]]
    elif not own:
        name = FINAL if n_trials == run.n_trials and not run.has_playoff else cut
        found += [bench.rounds_of(run, ranked(name, n)) for n in range(2, TOP + 1)]
    return min((each for each in found if each), key=lambda x: median_of(x.values()), default={})


def passage(
    bench: Bench,
    run: Run,
    quality: Rounds,
    *,
    by_trials: bool = False,
    ratio: Literal["value", "low", "high"] = "value",
) -> Interval:
    """Return the second (or trial) from which on a run had a quality, as timed anew.

    What a play-off chose counts from its end on, the play-off's own seconds included.
    ``ratio`` is the median of rounds, or a bound of its interval.
    """

    def over(rounds: Rounds) -> float | None:
        found = paired(rounds, quality)
        return None if found is None else float(getattr(found, ratio))

    steps: list[tuple[float, float | None]] = []
    for each in run.incumbents:
        at = each.n_trials if by_trials else each.time_sec
        steps.append((float(at), over(_of_incumbent(bench, run, each.n_trials))))
    end = float(run.n_trials if by_trials else run.finish_sec)
    final = anew(bench, run, FINAL)
    if final:
        steps.append((end, over(final)))
    return first_within(steps, end, TOLERANCE)


def _compare(
    bench: Bench, workload: str, method: str, pairs: Sequence[tuple[Run, Run]]
) -> Comparison:
    # Better than a baseline that found nothing is no merit; tables name such runs.
    pairs = [(base, run) for base, run in pairs if base.incumbents]
    figures: dict[str, Spread | None] = {}
    for name in (TIME, TRIALS):
        found = [_passages(bench, *pair, by_trials=name == TRIALS) for pair in pairs]
        reached = [each for each in found if each is not None]
        figures[name] = spread([value for value, _ in reached], [span for _, span in reached])
    figures[EQUAL_TIME] = _summary([_equal_time(bench, *pair) for pair in pairs])
    figures[EQUAL_TRIALS] = _summary([_equal_trials(bench, *pair) for pair in pairs])
    runs = [run for pair in pairs for run in pair]
    known = [_of_incumbent(bench, run, each.n_trials) for run in runs for each in run.incumbents]
    return Comparison(
        workload,
        method,
        len(pairs),
        figures,
        noise_of(bench.neutral.get(workload, {})),
        (sum(bool(each) for each in known), len(known)),
        scaled_speed_up(bench, list(pairs)),
    )


def _passages(
    bench: Bench, base: Run, run: Run, *, by_trials: bool
) -> tuple[Interval, Interval] | None:
    """Return the baseline's time to its final quality over the method's, and how sure that is.

    The second is from the upper bounds of the method's ratios and the lower ones of the
    baseline's to the reverse.
    """
    quality = anew(bench, base, FINAL)
    if not quality:
        return None

    def at(whose: Run, ratio: Literal["value", "low", "high"]) -> Interval:
        return passage(bench, whose, quality, by_trials=by_trials, ratio=ratio)

    least, most = at(base, "low").over(at(run, "high")), at(base, "high").over(at(run, "low"))
    return at(base, "value").over(at(run, "value")), Interval(least.low, most.high)


def _summary(found: Sequence[Paired | Interval | None]) -> Spread | None:
    values, ranges = [], []
    for each in found:
        if isinstance(each, Paired):
            values.append(exactly(each.value))
            ranges.append(Interval(each.low, each.high))
        elif each is not None:
            values.append(each)
    return spread(values, ranges)


def _equal_time(bench: Bench, base: Run, run: Run) -> Paired | Interval | None:
    # Who had nothing yet had nothing as good as what it had in the end.
    if not run.incumbents or bench.error_of(run):
        return _NOTHING
    end_sec = min(base.finish_sec, run.finish_sec)
    cuts = cut_of(base, end_sec), cut_of(run, end_sec)
    ours, theirs = (anew(bench, x, FINAL) for x in (run, base))
    if None not in cuts:
        return paired(anew(bench, base, cuts[0]), anew(bench, run, cuts[1]))
    bound = paired(theirs, ours)
    if bound is None or cuts == (None, None):
        return None
    return Interval(bound.value, math.inf) if cuts[0] is None else Interval(0.0, bound.value)


def _equal_trials(bench: Bench, base: Run, run: Run) -> Paired | Interval | None:
    n_trials = min(base.n_trials, run.n_trials)
    if bench.error_of(run) or not any(each.n_trials <= n_trials for each in run.incumbents):
        return _NOTHING
    cuts = [FINAL if each.n_trials == n_trials else str(n_trials) for each in (base, run)]
    return paired(anew(bench, base, cuts[0]), anew(bench, run, cuts[1]))


def _of_incumbent(bench: Bench, run: Run, n_trials: int) -> Rounds:
    """Return the rounds of what was best after so many trials, under whichever cut's name."""
    incumbent = _incumbent_at(run, n_trials)
    prefix = f"{run.key}/"
    for name, rounds in bench.neutral.get(run.spec.workload, {}).items():
        cut = name.removeprefix(prefix)
        if cut == FINAL and run.ends_with_record:
            cut = str(run.n_trials)
        is_cut = name.startswith(prefix) and cut.isdigit() and incumbent is not None
        if is_cut and _incumbent_at(run, int(cut)) == incumbent:
            return rounds
    return {}


def _incumbent_at(run: Run, n_trials: int) -> Incumbent | None:
    before = [each for each in run.incumbents if each.n_trials <= n_trials]
    return before[-1] if before else None


def _copies(timed: Mapping[str, Rounds]) -> list[tuple[str, Rounds]]:
    ends = f"-{COPY}"
    return [
        (name, each)
        for name, each in timed.items()
        if name.endswith(ends) and name.removesuffix(ends) in timed
    ]
