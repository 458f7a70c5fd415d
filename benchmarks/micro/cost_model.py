"""Forest against stock XGBModel on recorded pools: who ranks better, and at what cost.

    python -m benchmarks.micro.cost_model benchmarks/micro/pools/*.npz --out result.json

For each pool and size of the training set, on the same random splits: Spearman's rank
correlation on the candidates that were not learned; top-8 regret (fastest of the 8 that
are forecast to be fastest, relative to the fastest there is; 0 is perfect); seconds of
fit and forecast; for the forest also the root mean square of (measured - mean) / std, and the
share of measured values within the forecasts' 90 % intervals. The stock model runs its own code
for training and forecast, on the same features. The blend averages the ranks that both give,
weighted by how well each ranks samples that it had not seen.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tvm.s_tir.meta_schedule.cost_model import XGBModel

from benchmarks.machine import write_figure
from tvm_adaptive.cost_model.features import to_rows
from tvm_adaptive.cost_model.surrogate import Surrogate, SurrogateOptions, rank_correlation
from tvm_adaptive.values.ranks import average_ranks

SIZES = (32, 64, 128, 512)
# What a small batch of measurements would find of the best.
TOP = 8
# With fewer, neither rank correlation nor regret says much.
MIN_TEST = 64


class Pool(NamedTuple):
    """Candidates that ran: per-store features, seconds."""

    name: str
    blocks: list[np.ndarray]
    seconds: np.ndarray
    about: dict[str, Any]


class Answer(NamedTuple):
    """Scores of the test candidates (higher is faster), and how calibrated they are."""

    scores: np.ndarray
    calibration: Callable[[], tuple[float, float]]  # z rms and coverage


Method = Callable[[Pool, np.ndarray, np.ndarray], Answer]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pools", type=Path, nargs="+")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    pools = [load(path) for path in options.pools]
    warm_up(pools[0])
    rows = [
        row
        for pool in pools
        for size in options.sizes
        if len(pool.seconds) - size >= MIN_TEST
        for row in compare(pool, size, options.repeats)
    ]
    about = {pool.name: pool.about for pool in pools}
    write_figure(options.out, {"repeats": options.repeats, "pools": about, "rows": rows})
    print(table(rows))


def load(path: Path) -> Pool:
    with np.load(path, allow_pickle=False) as archive:
        stores, n_stores = archive["stores"], archive["n_stores"]
        seconds, about = archive["seconds"], json.loads(archive["about"].tobytes())
    blocks = np.split(stores, np.cumsum(n_stores)[:-1])
    # The stock model has no place for candidates without stores.
    usable = np.flatnonzero(np.isfinite(seconds) & (n_stores > 0))
    return Pool(about["workload"], [blocks[i] for i in usable], seconds[usable], about)


def compare(pool: Pool, size: int, repeats: int) -> list[dict[str, Any]]:
    """Run all methods on the same splits; one row for each method."""
    runs: dict[str, list[tuple[float, ...]]] = {name: [] for name in METHODS}
    for repeat in range(repeats):
        order = np.random.default_rng(repeat).permutation(len(pool.seconds))
        train, test = order[:size], order[size:]
        for name, method in METHODS.items():
            runs[name].append(check(method, pool, train, test))
    names = ("spearman", "top8_regret", "fit_predict_sec", "z_rms", "coverage")
    return [
        {"pool": pool.name, "n_train": size, "method": name}
        | {column: [run[i] for run in values] for i, column in enumerate(names)}
        for name, values in runs.items()
    ]


def check(method: Method, pool: Pool, train: np.ndarray, test: np.ndarray) -> tuple[float, ...]:
    start_sec = time.perf_counter()
    answer = method(pool, train, test)
    elapsed_sec = time.perf_counter() - start_sec
    seconds = pool.seconds[test]
    chosen = np.argsort(-answer.scores, kind="stable")[:TOP]
    regret = seconds[chosen].min() / seconds.min() - 1.0
    spearman = rank_correlation(answer.scores, -seconds)
    return spearman, float(regret), elapsed_sec, *answer.calibration()


def forest(pool: Pool, train: np.ndarray, test: np.ndarray, **options: Any) -> Answer:
    """Learn and forecast as RFEICostModel does with ``acquisition="mean"``."""
    surrogate = Surrogate(SurrogateOptions(acquisition="mean", **options), seed=0)
    rows = to_rows([pool.blocks[i] for i in train])
    surrogate.dataset.add(pool.name, rows, pool.seconds[train])
    surrogate.refit_if_due()
    rows = to_rows([pool.blocks[i] for i in test])
    scores = surrogate.scores(pool.name, rows)
    assert scores is not None

    def calibration() -> tuple[float, float]:
        quality = surrogate.check(pool.name, rows, pool.seconds[test])
        assert quality is not None
        return quality.z_rms, quality.coverage

    return Answer(scores, calibration)


def forest_paper(pool: Pool, train: np.ndarray, test: np.ndarray) -> Answer:
    """AdaTune's: ten trees, throughput as the target."""
    return forest(pool, train, test, n_trees=10, target="throughput")


def stock_xgb(pool: Pool, train: np.ndarray, test: np.ndarray) -> Answer:
    """Train and forecast with the stock model's own procedures and configuration."""
    return Answer(xgb_scores(pool, train, test), lambda: (math.nan, math.nan))


def xgb_scores(pool: Pool, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    model = XGBModel()._inst
    seconds = pool.seconds[train].astype(np.float32)
    model._train(xs=[pool.blocks[i] for i in train], ys=seconds.min() / seconds)
    return np.asarray(model._predict(xs=[pool.blocks[i] for i in test]))


def blend(pool: Pool, train: np.ndarray, test: np.ndarray) -> Answer:
    """Average the ranks of both, each weighted by its rank correlation on unseen samples.

    Both are judged by the same four fifths and fifth of the training set; weights are squares
    of correlations above 0.
    """
    kept, unseen = train[: len(train) * 4 // 5], train[len(train) * 4 // 5 :]
    weights, ranks = [], []
    for method in (forest, stock_xgb):
        correlation = rank_correlation(method(pool, kept, unseen).scores, -pool.seconds[unseen])
        weights.append(max(np.nan_to_num(correlation), 0.01) ** 2)
        ranks.append(average_ranks(method(pool, train, test).scores))
    return Answer(np.average(ranks, axis=0, weights=weights), lambda: (math.nan, math.nan))


METHODS: dict[str, Method] = {
    "forest": forest,
    "forest, paper": forest_paper,
    "stock xgb": stock_xgb,
    "blend": blend,
}


def warm_up(pool: Pool) -> None:
    """Let both import their libraries before anything is timed."""
    few = np.arange(16)
    for method in METHODS.values():
        method(pool, few, few)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| pool | n | method | Spearman | top-8 regret | fit + predict, s | z rms | within 90 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        means = [float(np.mean(row[name])) for name in ("spearman", "top8_regret")]
        seconds, z_rms = np.median(row["fit_predict_sec"]), np.mean(row["z_rms"])
        sure = "|" if np.isnan(z_rms) else f"{z_rms:.2f} | {np.mean(row['coverage']):.0%}"
        lines.append(
            f"| {row['pool']} | {row['n_train']} | {row['method']} | {means[0]:.3f} | "
            f"{means[1]:.1%} | {seconds:.3f} | {sure} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
