"""Tell what is won when more records run for the final, and weights change between runs.

    python -m benchmarks.micro.finals runs/encoder --out finals.json

Of the slowest functions of a finished run, the fastest records are built again and timed in
interleaved rounds, with the same weights over and over and with weights that change, as in
a network. Half of the rounds, drawn at random, then decide; the other half, with changing
weights, say how fast the choice really is.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import write_figure
from tvm_adaptive._tvm import BuilderInput, IRModule, Target, json_database, structural_hash
from tvm_adaptive._tvm.tensor_functions import weights_of
from tvm_adaptive.builder import PersistentBuilder
from tvm_adaptive.runner.playoff.modules import (
    buffers_of,
    mean_sec,
    sane_records,
    scheduled,
)
from tvm_adaptive.runner.playoff.playoff import finalist_pool
from tvm_adaptive.runner.playoff.worker import Kernel, time_once
from tvm_adaptive.tuning.target import n_cores_of, resolve_target

REPEAT_MS = 20.0
TIMEOUT_SEC = 30.0
# What a play-off had before anybody could qualify.
N_FINALISTS = 3
N_SPLITS = 200
WAYS = ("same", "changing")
COLUMNS = (
    "three, changing weights",
    "all, same weights",
    "all, changing weights",
    "the best, had one known",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="finals with more records")
    parser.add_argument("folder", type=Path, help="a run's work directory")
    parser.add_argument("--functions", type=int, default=4)
    parser.add_argument("--records", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target = resolve_target("cpu")
    database = json_database(options.folder)
    mods = {
        structural_hash(each.workload.mod): each.workload.mod
        for each in database.get_all_tuning_records()
    }
    ranked = {key: sane_records(database, mod, target) for key, mod in mods.items()}
    known = [records for records in ranked.values() if records]
    known.sort(key=lambda records: -mean_sec(records[0]))
    found = [
        timed(records[: options.records], target, options.rounds)
        for records in known[: options.functions]
    ]
    write_figure(options.out, {"functions": found})
    print(table(found))


def timed(records: Sequence[Any], target: Target, rounds: int) -> dict[str, Any]:
    """Build records of one function and time them in turns.

    Returns
    -------
    dict
        ``recorded_ms`` of those that run, and for each way a list of rounds in
        milliseconds per record.
    """
    distinct: dict[int, tuple[Any, IRModule]] = {}
    for record in records:
        mod = scheduled(record)
        distinct.setdefault(structural_hash(mod), (record, mod))
    chosen = list(distinct.values())
    with (
        contextlib.closing(PersistentBuilder(patience=None)) as builder,
        contextlib.closing(finalist_pool(n_cores_of(target))) as pool,
    ):
        built = builder.build([BuilderInput(mod, target) for _, mod in chosen])
        samples: list[dict[str, list[float]]] = [{way: [] for way in WAYS} for _ in chosen]
        for number in range(rounds):
            for index in alternating(len(chosen), number):
                for way in WAYS:
                    kernel = kernel_of(built[index], chosen[index][1], way)
                    samples[index][way].append(ms_of(pool, kernel))
    good = [
        (1e3 * mean_sec(record), each)
        for (record, _), each in zip(chosen, samples, strict=True)
        if np.isfinite([each[way] for way in WAYS]).all()
    ]
    return {
        "recorded_ms": [recorded_ms for recorded_ms, _ in good],
        **{f"{way}_ms": [each[way] for _, each in good] for way in WAYS},
    }


def alternating(n: int, number: int) -> list[int]:
    return list(range(n)) if number % 2 == 0 else list(range(n))[::-1]


def kernel_of(built: Any, mod: IRModule, way: str) -> Kernel | None:
    """Return what to time; None for what was not built."""
    if built.artifact_path is None:
        return None
    weights = weights_of(mod) if way == "changing" else ()
    return Kernel(str(built.artifact_path), "cpu", buffers_of(mod), weights=weights)


def ms_of(pool: Any, kernel: Kernel | None) -> float:
    if kernel is None:
        return math.nan
    (outcome,) = pool.map(time_once, [(kernel, 0, REPEAT_MS)], TIMEOUT_SEC)
    return math.nan if outcome.error is not None else 1e3 * float(outcome.value)


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the truth of each choice over that of the best of three, as Markdown."""
    lines = [
        f"| records | best as recorded, ms | {' | '.join(COLUMNS)} |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for each in found:
        ratios = " | ".join(f"{ratio:.3f}" for ratio in choices(each).values())
        best_ms = min(each["recorded_ms"])
        lines.append(f"| {len(each['recorded_ms'])} | {best_ms:.3g} | {ratios} |")
    return "\n".join(lines)


def choices(each: dict[str, Any], seed: int = 0) -> dict[str, float]:
    """Return how slow each way's choice is, over that of three with the same weights.

    Parameters
    ----------
    each : dict
        From :func:`timed`.
    seed : int, default 0

    Returns
    -------
    dict of str to float
        By the names in ``COLUMNS``; lower is better, below 1 is faster.
    """
    rng = np.random.default_rng(seed)
    same, changing = (np.array(each[f"{way}_ms"]) for way in WAYS)
    three = np.argsort(each["recorded_ms"])[:N_FINALISTS]
    ratios: dict[str, list[float]] = {column: [] for column in COLUMNS}
    for _ in range(N_SPLITS):
        rounds = rng.permutation(same.shape[1])
        decide, check = np.array_split(rounds, 2)
        truth = np.median(changing[:, check], axis=1)
        by_same, by_changing = (np.median(way[:, decide], axis=1) for way in (same, changing))
        before = truth[three[by_same[three].argmin()]]
        chosen = (three[by_changing[three].argmin()], by_same.argmin(), by_changing.argmin())
        for column, index in zip(COLUMNS, (*chosen, truth.argmin()), strict=True):
            ratios[column].append(truth[index] / before)
    return {column: float(np.mean(values)) for column, values in ratios.items()}


if __name__ == "__main__":
    main()
