"""How often a play-off chooses a slower finalist, simulated with recorded noise.

    python -m benchmarks.micro.playoff_simulation --out playoff_simulation.json

The package's own rounds choose between finalists whose timings are recorded ones: what a library's
time in a round of a published neutral measurement is of its median, times how slow the finalist
is. Rounds are drawn with replacement, and a round's libraries stay together, so that what the
machine does to all of them cancels as it does in a play-off.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.machine import write_figure
from benchmarks.micro.recorded_noise import RESULTS_FOLDER, Array, read_recordings
from tvm_adaptive.runner.playoff.rounds import play_rounds

# The slower finalist's time over the other's; the goal is for the first.
SLOWER = (1.03, 1.1)
_N_PLAYOFFS = 500
# More than a play-off makes of one finalist: 20 rounds, and 10 that confirm the winner.
_MOST_TIMINGS = 100


def is_wrong(factors: Array, slower: float, rng: np.random.Generator) -> tuple[bool, int]:
    """Return whether a play-off chooses the slower of two finalists, and its timings."""
    slowness = (1.0, slower)
    columns = rng.choice(factors.shape[1], len(slowness), replace=False)
    rows = rng.integers(factors.shape[0], size=_MOST_TIMINGS)
    n_timed = [0] * len(slowness)

    def measure(index: int) -> float:
        n_timed[index] += 1
        return float(slowness[index] * factors[rows[n_timed[index] - 1], columns[index]])

    result = play_rounds(measure, len(slowness), clock=lambda: 0.0)
    return result.ranking[0] != 0, sum(n_timed)


def simulate(
    factors: Array, slower: float, n_playoffs: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Return the share of play-offs that choose the slower finalist, and their mean timings."""
    wrong, n_timed = np.transpose([is_wrong(factors, slower, rng) for _ in range(n_playoffs)])
    return float(wrong.mean()), float(n_timed.mean())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--playoffs", type=int, default=_N_PLAYOFFS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    rng, rows = np.random.default_rng(0), []
    print("| recording | noise | " + " | ".join(f"{each:g} x as slow" for each in SLOWER) + " |")
    print("|---" * (2 + len(SLOWER)) + "|")
    for recording in sorted(read_recordings(RESULTS_FOLDER), key=lambda each: each.noise):
        found = [simulate(recording.factors, each, options.playoffs, rng) for each in SLOWER]
        rows.append({"recording": recording.name, "noise": recording.noise, "found": found})
        cells = " | ".join(f"{100 * wrong:.1f} % ({number:.0f})" for wrong, number in found)
        print(f"| {recording.name} | {100 * recording.noise:.1f} % | {cells} |", flush=True)
    write_figure(options.out, {"slower": SLOWER, "n_playoffs": options.playoffs, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
