"""Replay searches on recorded pools, to see which model finds a fast candidate first.

    python -m benchmarks.micro.replayed_search benchmarks/micro/pools/*.npz --seeds 60 --out r.json

A search begins with eight random candidates of a pool and takes eight more at a time, those that
the model prefers of all that are left. Nothing is built or timed. For each model: the best of so
many trials over the best of the pool, geometric mean over seeds, and the same over the forest's
with its standard error. The rank sum adds the ranks of both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.machine import write_figure
from benchmarks.micro.cost_model import Pool, load, xgb_scores
from benchmarks.tables import markdown
from tvm_adaptive.cost_model.features import to_rows
from tvm_adaptive.cost_model.surrogate import Surrogate, SurrogateOptions
from tvm_adaptive.values.ranks import average_ranks
from tvm_adaptive.values.trial import FloatArray

BATCH = 8
TRIALS = (24, 32, 64)

Indices = npt.NDArray[np.intp]
# From what was measured and what is left to scores of the latter, higher is better.
Model = Callable[[Pool, FloatArray, Indices, Indices, int], FloatArray]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pools", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=60, metavar="N")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, list[list[float]]]] = {}
    rows: list[list[str]] = []
    for path in options.pools:
        pool = load(path)
        features = np.asarray(to_rows(pool.blocks))
        curves = found[pool.name] = {}
        for name, model in MODELS.items():
            curves[name] = [replay(pool, features, model, seed) for seed in range(options.seeds)]
            rows.append([pool.name, name, *cells(curves[name], curves["forest"])])
        write_figure(options.out, {"trials": TRIALS, "found": found})
    print(markdown(["pool", "model", *(f"best of {n}" for n in TRIALS)], rows))
    return 0


def replay(pool: Pool, rows: FloatArray, model: Model, seed: int) -> list[float]:
    """Return the best of so many trials over the best of the pool."""
    seconds = pool.seconds
    measured = np.random.default_rng(seed).permutation(len(seconds))[:BATCH]
    while len(measured) < max(TRIALS):
        left = np.setdiff1d(np.arange(len(seconds)), measured)
        scores = model(pool, rows, measured, left, seed)
        chosen = left[np.argsort(-scores, kind="stable")[:BATCH]]
        measured = np.concatenate([measured, chosen])
    return [float(seconds[measured[:n]].min() / seconds.min()) for n in TRIALS]


def cells(found: Sequence[Sequence[float]], of_forest: Sequence[Sequence[float]]) -> list[str]:
    """Return the best of so many trials; in brackets over the forest's, with standard errors."""
    logs = np.log(np.asarray(found))
    differences = logs - np.log(np.asarray(of_forest))
    means, errors = differences.mean(axis=0), differences.std(axis=0) / np.sqrt(len(found))
    parts = [f"{value:.3f}" for value in np.exp(logs.mean(axis=0))]
    if differences.any():
        parts = [
            f"{part} ({np.exp(mean):.3f} +- {error:.3f})"
            for part, mean, error in zip(parts, means, errors, strict=True)
        ]
    return parts


def forest(pool: Pool, rows: FloatArray, measured: Indices, left: Indices, seed: int) -> FloatArray:
    """Score by expected improvement, as the default model does."""
    surrogate = Surrogate(SurrogateOptions(), seed=seed)
    surrogate.dataset.add(pool.name, rows[measured], pool.seconds[measured])
    surrogate.refit_if_due()
    scores = surrogate.scores(pool.name, rows[left])
    assert scores is not None
    return scores


def stock_xgb(
    pool: Pool, rows: FloatArray, measured: Indices, left: Indices, seed: int
) -> FloatArray:
    """Score by the forecast of stock's model."""
    del rows, seed
    return xgb_scores(pool, measured, left)


def rank_sum(
    pool: Pool, rows: FloatArray, measured: Indices, left: Indices, seed: int
) -> FloatArray:
    """Score by the sum of both models' ranks."""
    both = (model(pool, rows, measured, left, seed) for model in (forest, stock_xgb))
    return np.asarray(sum(average_ranks(scores) for scores in both))


MODELS: dict[str, Model] = {"forest": forest, "stock xgb": stock_xgb, "rank sum": rank_sum}


if __name__ == "__main__":
    sys.exit(main())
