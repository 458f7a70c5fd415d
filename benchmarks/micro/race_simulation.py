"""How often a race drops the faster candidate, simulated with recorded noise.

    python -m benchmarks.micro.race_simulation --out race_simulation.json

The runner's own code measures candidates whose timer replays single runs of a kernel
(``micro/variance.py``), multiplied by what a round of a published neutral measurement differs from
the median of its rounds: seconds and minutes apart, a virtual machine is not equally fast. The
incumbent is the fastest of several measurements of equally fast kernels, lucky as it is; or, as a
race against a repeat of the incumbent in the same batch would be, a measurement in the same round.
A race stays within one neutral measurement, and its limit follows the noise as a run in that hour
would estimate it, from pairs of measurements of one round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.figures.variance import read_runs
from benchmarks.machine import write_figure
from benchmarks.micro.recorded_noise import RESULTS_FOLDER, Array, Recording, read_recordings
from tvm_adaptive.runner.evaluator import RACED, Race, evaluate
from tvm_adaptive.runner.stopping import make_rule
from tvm_adaptive.values.noise import MachineNoise

RUNS_FILE = Path(__file__).parent / "results" / "variance.json.xz"
# Times of the incumbent's: the goal is for the first; the others show what a race is for.
CANDIDATES = (0.95, 1.5, 2.0)
# Measurements that the incumbent is the fastest of: alone, and of a batch; 0 is the same round.
LUCKIEST_OF = (0, 1, 16)
_N_REPEATS = 6000


class Hour(NamedTuple):
    """What measurements differed by, and the noise that a run would estimate there."""

    rounds: Array  # of shape (rounds, libraries), times over their medians
    noise: float


class ReplayTimer:
    """A timer of the runner that returns recorded runs, from a random one on, in turns."""

    def __init__(self, run_secs: Array, factor: float, rng: np.random.Generator) -> None:
        self._sums = np.concatenate([[0.0], np.cumsum(run_secs * factor)])
        self._n = len(run_secs)
        self._at = int(rng.integers(self._n))
        self.now_sec = 0.0

    def __call__(self, number: int, repeat: int) -> list[float]:
        """Return the means of micro-batches."""
        return [self._next(number) / number for _ in range(repeat)]

    def _next(self, number: int) -> float:
        rounds, rest = divmod(self._at + number, self._n)
        total = rounds * self._sums[-1] + self._sums[rest] - self._sums[self._at]
        self._at = rest
        self.now_sec += total
        return float(total)


def measured_sec(
    run_secs: Array, factor: float, race: Race | None, rng: np.random.Generator
) -> tuple[float, bool]:
    """Measure a replayed kernel; return its seconds, and whether the race dropped it."""
    timer = ReplayTimer(run_secs, factor, rng)
    timing = evaluate(timer, make_rule("precision"), race=race, clock=lambda: timer.now_sec)
    return timing.mean_sec, timing.reason == RACED


def share_dropped(
    kernels: Sequence[Array],
    hours: Sequence[Hour],
    candidate: float,
    *,
    luckiest_of: int,
    n_repeats: int,
    rng: np.random.Generator,
) -> float:
    """Return the share of races that drop a candidate.

    Parameters
    ----------
    kernels : sequence of ndarray
        Seconds of single runs of each kernel.
    hours : sequence of Hour
        Each is as likely as it has rounds.
    candidate : float
        Its true time over the incumbent's true time.
    luckiest_of : int
        Measurements that the incumbent is the fastest of; 0 for one of the candidate's round.
    n_repeats : int
    rng : numpy.random.Generator
    """
    n_dropped = 0
    n_rounds = np.array([len(hour.rounds) for hour in hours])
    for each in rng.choice(len(hours), n_repeats, p=n_rounds / n_rounds.sum()):
        hour = hours[each]
        kernel = kernels[int(rng.integers(len(kernels)))]
        if luckiest_of:
            own, *others = rng.choice(hour.rounds.ravel(), 1 + luckiest_of)
        else:
            own, *others = rng.choice(rng.choice(hour.rounds), 2, replace=False)
        incumbent_sec = min(measured_sec(kernel, other, None, rng)[0] for other in others)
        race = Race(incumbent_sec, hour.noise)
        n_dropped += measured_sec(kernel, candidate * own, race, rng)[1]
    return n_dropped / n_repeats


def estimated_noise(rounds: Array, rng: np.random.Generator) -> float:
    """Return the noise that a run would estimate from two measurements of each round."""
    noise = MachineNoise()
    for each in rng.permutation(len(rounds)):
        noise.add_pair(*rng.choice(rounds[each], 2, replace=False))
    return noise.relative_error


def hours_of(recordings: Sequence[Recording], rng: np.random.Generator) -> list[Hour]:
    """Return recorded rounds with the noise that a run at that time would allow for."""
    return [Hour(each.factors, estimated_noise(each.factors, rng)) for each in recordings]


def recorded_runs(path: Path) -> dict[str, list[Array]]:
    """Return the seconds of single runs of each operator's kernels."""
    return {
        name: [np.array(runs) / 1e3 for runs in kernels]
        for name, kernels in read_runs(path).items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=_N_REPEATS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    runs = recorded_runs(RUNS_FILE)
    rng = np.random.default_rng(0)
    hours = hours_of(read_recordings(RESULTS_FOLDER), rng)
    noises = np.quantile([hour.noise for hour in hours], (0.0, 0.5, 1.0))
    limits = [f"{Race(1.0, noise).behind_factor:.2f}" for noise in noises]
    print(f"behind at {limits[1]} x ({limits[0]} to {limits[2]})")
    rows = []
    print("| operator | luckiest of | " + " | ".join(f"{c:g} x" for c in CANDIDATES) + " |")
    print("|---" * (2 + len(CANDIDATES)) + "|")
    for name, kernels in runs.items():
        for n in LUCKIEST_OF:
            # A long search's incumbent takes many measurements; fewer races show it as well.
            n_repeats = max(1, options.repeats // max(1, n))
            shares = [
                share_dropped(
                    kernels,
                    hours,
                    c,
                    luckiest_of=n,
                    n_repeats=n_repeats,
                    rng=rng,
                )
                for c in CANDIDATES
            ]
            rows.append({"operator": name, "luckiest_of": n, "n": n_repeats, "shares": shares})
            cells = " | ".join(f"{100 * share:.1f} %" for share in shares)
            print(f"| {name} | {n} | {cells} |", flush=True)
    n_rounds = sum(len(hour.rounds) for hour in hours)
    found = {"candidates": CANDIDATES, "n_rounds": n_rounds, "noise": list(noises), "rows": rows}
    write_figure(options.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
