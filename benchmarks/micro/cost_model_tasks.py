"""The forest on tasks of which it knows few samples: what other tasks teach, and how surely.

    python benchmarks/micro/cost_model_tasks.py --out result.json

Of each file of starter records, a fifth of the tasks is held back at a time; the model learns
the first k samples of these and all samples of the others. On the other samples of each task:
Spearman's rank correlation; top-4 regret (fastest of the four that are forecast to be fastest,
relative to the fastest there is); for k > 0 also the gain (logarithm of how much faster than
the first k the fastest of the four of largest expected improvement is), the root mean square
of (measured - mean) / std in throughput, and how much of 50 and 90 % intervals is covered.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from tvm_adaptive.cost_model.surrogate import Surrogate, SurrogateOptions, rank_correlation
from tvm_adaptive.database.location import STARTER_FOLDER
from tvm_adaptive.database.starter_file import StarterTask, read_starter

N_KNOWN = (0, 4, 8, 16)
N_FOLDS = 5
TOP = 4
# With fewer samples nothing is left to rank.
MIN_SAMPLES = 20
# Half-widths of normal intervals that hold 50 and 90 %, in standard deviations.
INTERVALS = {"covered_50": 0.6745, "covered_90": 1.6449}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for path in sorted(STARTER_FOLDER.glob("*.json.xz")):
        _, tasks = read_starter(path)
        for n_known in N_KNOWN:
            found = [each for seed in range(options.seeds) for each in held(tasks, n_known, seed)]
            names = sorted(set().union(*found))
            means = {name: float(np.mean([each[name] for each in found])) for name in names}
            if "z_square" in means:
                means["z_rms"] = means.pop("z_square") ** 0.5
            rows.append({"records": path.name.partition(".")[0], "n_known": n_known, **means})
            print(" ".join(f"{key}={_text(value)}" for key, value in rows[-1].items()), flush=True)
    options.out.write_text(json.dumps(rows, indent=1))


def held(tasks: list[StarterTask], n_known: int, seed: int) -> list[dict[str, float]]:
    """Return the figures of each task that was held back."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(len(task.seconds)) for task in tasks]
    large = rng.permutation([i for i, task in enumerate(tasks) if len(task.seconds) >= MIN_SAMPLES])
    found = []
    for fold in range(N_FOLDS):
        held_back = set(large[fold::N_FOLDS].tolist())
        surrogates = [Surrogate(SurrogateOptions(acquisition=a), seed) for a in ("mean", "ei")]
        for i, (task, order) in enumerate(zip(tasks, orders, strict=True)):
            kept = order[:n_known] if i in held_back else order
            for surrogate in surrogates:
                surrogate.add(task.workload_key, task.rows[kept], task.seconds[kept])
        for surrogate in surrogates:
            surrogate.refit_if_due()
        found += [judged(*surrogates, tasks[i], orders[i], n_known) for i in sorted(held_back)]
    return found


def judged(
    by_mean: Surrogate, by_ei: Surrogate, task: StarterTask, order: np.ndarray, n_known: int
) -> dict[str, float]:
    """Compare forecasts with what was measured of one task."""
    key, rest = task.workload_key, order[n_known:]
    seconds, rows = task.seconds[rest], task.rows[rest]
    scores = by_mean.scores(key, rows)
    assert scores is not None
    found = {
        "spearman": rank_correlation(scores, -seconds),
        "top4_regret": _fastest(scores, seconds) / seconds.min() - 1.0,
    }
    posterior, by_gain = by_mean.posterior(key, rows), by_ei.scores(key, rows)
    if posterior is not None and by_gain is not None:
        best_sec = task.seconds[order[:n_known]].min()
        z = (best_sec / seconds - posterior.mean) / np.maximum(posterior.std, 0.01)
        found["z_square"] = float(np.mean(z**2))
        found |= {name: float(np.mean(np.abs(z) < width)) for name, width in INTERVALS.items()}
        found["gain"] = max(0.0, float(np.log(best_sec / _fastest(by_gain, seconds))))
    return found


def _fastest(scores: np.ndarray, seconds: np.ndarray) -> float:
    return float(seconds[np.argsort(-scores, kind="stable")[:TOP]].min())


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
