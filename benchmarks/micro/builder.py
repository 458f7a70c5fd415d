"""The memory of compile workers over thousands of builds, with and without recycling.

    python -m benchmarks.micro.builder --builds 5000 --out builder.json

Builds random candidates of one operator over and over. The memory reported is the
proportional share (PSS) of all processes that the builder started, the server that they
are forked from included.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import write_figure
from benchmarks.micro.runner import drawn_candidates
from tvm_adaptive import PersistentBuilder
from tvm_adaptive._tvm import BuilderInput
from tvm_adaptive.tuning.target import resolve_target

BATCH = 50


def main() -> None:
    parser = argparse.ArgumentParser(description="the memory of compile workers")
    parser.add_argument("--workload", default="GMM")
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--builds", type=int, default=5000)
    parser.add_argument("--max-uses", type=int, nargs="+", default=[500, 10**9])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target = resolve_target("cpu")
    candidates = drawn_candidates(options.workload, options.candidates, target, seed=1)
    inputs = [BuilderInput(candidate.sch.mod, target) for candidate in candidates]
    found = {}
    for max_uses in options.max_uses:
        found[str(max_uses)] = curve(inputs, max_uses, options.builds)
    write_figure(options.out, {"workload": options.workload, "curves": found})
    for max_uses, points in found.items():
        peak = max(point["pss_mb"] for point in points)
        last = points[-1]
        print(
            f"replaced after {max_uses}: {last['n_builds']} builds, {last['n_errors']} errors, "
            f"{last['seconds']:.0f} s, at the end {last['pss_mb']:.0f} MB, at the most {peak:.0f}"
        )


def curve(inputs: list[BuilderInput], max_uses: int, n_builds: int) -> list[dict[str, Any]]:
    """Build so many times; return the memory after each batch."""
    points: list[dict[str, Any]] = []
    n_errors = 0
    start_sec = time.perf_counter()
    with contextlib.closing(PersistentBuilder(max_uses=max_uses, link=True)) as builder:
        for first in range(0, n_builds, BATCH):
            batch = [inputs[i % len(inputs)] for i in range(first, min(first + BATCH, n_builds))]
            results = builder.build(batch)
            n_errors += sum(result.error_msg is not None for result in results)
            for result in results:
                Path(str(result.artifact_path)).unlink(missing_ok=True)
            points.append(
                {
                    "n_builds": first + len(batch),
                    "n_errors": n_errors,
                    "seconds": time.perf_counter() - start_sec,
                    "pss_mb": pss_mb(),
                }
            )
    return points


def pss_mb() -> float:
    """Return the proportional share of memory of all children, in MB."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += child.memory_full_info().pss
    return total / 2**20


if __name__ == "__main__":
    main()
