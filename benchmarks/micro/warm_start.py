"""What memory saves: the same network again, and a sibling of it, each in a fresh process.

    python -m benchmarks.micro.warm_start resnet18 --budget 10m --out runs/warm
    python -m benchmarks.micro.warm_start transformer --sibling sequence=64 --out runs/warm

Runs, in this order: the network without memory, which fills a store; the same network
with that store; and, with --sibling, the network in another size without memory and with
the store as the first run left it. Of each run the sum of its tasks over the seconds is
kept; quality is what the run without memory had at its end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive.cli.arguments import parse_duration
from tvm_adaptive.config import DEFAULT
from tvm_adaptive.cores import thread_env
from tvm_adaptive.measure_callback.journal import read_journal
from tvm_adaptive.models import BUILTIN
from tvm_adaptive.target import n_cores_of, resolve_target
from tvm_adaptive.tune import tune_relax

STORE = "records.db"
# Two runs that end at the same speed differ by as much in what they recorded.
TOLERANCES = (0.0, 0.02, 0.05)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="what memory saves")
    parser.add_argument("network", choices=list(BUILTIN))
    parser.add_argument("--sibling", action="append", default=[], metavar="OPTION=N")
    parser.add_argument("--budget", type=parse_duration, default=600.0, metavar="TIME")
    parser.add_argument("--warm-budget", type=parse_duration, metavar="TIME", help="of warm runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", help=argparse.SUPPRESS)  # this process is one of the runs
    options = parser.parse_args(arguments)
    if options.run:
        tune_once(json.loads(options.run))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    parts = [each.partition("=") for each in options.sibling]
    sibling = {key: int(value) for key, _, value in parts}
    store = str(options.out / STORE)
    runs = [("cold", {}, store, options.budget), ("warm", {}, store, options.warm_budget)]
    if sibling:
        runs += [
            ("sibling-cold", sibling, "none", options.budget),
            ("sibling-warm", sibling, f"{store}.copy", options.warm_budget),
        ]
    for number, (name, sizes, used, budget_sec) in enumerate(runs):
        if name == "warm":  # what it adds must not help the sibling
            shutil.copy(store, f"{store}.copy")
        spec = {
            "network": options.network,
            "sizes": sizes,
            "store": used,
            "budget_sec": budget_sec or options.budget,
            "seed": options.seed + number,
            "out": str(options.out / name),
        }
        run_process(options, spec)
    print(table(options.out, [name for name, *_ in runs]))
    return 0


def run_process(options: argparse.Namespace, spec: dict[str, Any]) -> None:
    """Do one run in a fresh process."""
    env = {**os.environ, **thread_env(n_cores_of(resolve_target("cpu")))}
    command = [sys.executable, "-m", "benchmarks.micro.warm_start", options.network]
    with open(options.out / f"{Path(spec['out']).name}.log", "wb") as log:
        subprocess.run(
            [*command, "--out", str(options.out), "--run", json.dumps(spec)],
            stdout=log,
            stderr=log,
            env=env,
            check=True,
        )


def tune_once(spec: dict[str, Any]) -> None:
    """Tune, in this process."""
    network = BUILTIN[spec["network"]](**spec["sizes"])
    tune_relax(
        network.mod,
        network.params,
        work_dir=spec["out"],
        budget_sec=spec["budget_sec"],
        seed=spec["seed"],
        config=DEFAULT.replace(store=spec["store"]),
    )


def curve_of(folder: Path) -> list[tuple[float, float]]:
    """Return (seconds, milliseconds of all tasks) after each round of a run."""
    return [
        (float(event["time_sec"]), float(event["weighted_ms"]))
        for event in read_journal(folder / "journal.jsonl")
        if event["event"] == "measured" and event["weighted_ms"] is not None
    ]


def time_to(curve: Sequence[tuple[float, float]], quality_ms: float) -> float:
    """Return the seconds until a run was as good; infinite if it never was."""
    return next((sec for sec, ms in curve if ms <= quality_ms), math.inf)


def table(out: Path, names: Sequence[str]) -> str:
    """Return what each run reached and when, as Markdown."""
    lines = ["| run | first result of all tasks, s | ms then | at its end | after s |"]
    lines.append("|---|---|---|---|---|")
    curves = {name: curve_of(out / name) for name in names}
    for name, curve in curves.items():
        if not curve:  # its seconds did not reach so far
            lines.append(f"| {name} | never | - | - | - |")
            continue
        (first_sec, first_ms), (last_sec, last_ms) = curve[0], curve[-1]
        lines.append(
            f"| {name} | {first_sec:.1f} | {first_ms:.2f} | {last_ms:.2f} | {last_sec:.0f} |"
        )
    lines += ["", "| | to | cold, s | warm, s | x |", "|---|---|---|---|---|"]
    for cold, warm in (("cold", "warm"), ("sibling-cold", "sibling-warm")):
        if not curves.get(cold):
            continue
        end_ms = curves[cold][-1][1]
        for tolerance in TOLERANCES:
            quality_ms = end_ms * (1.0 + tolerance)
            cold_sec, warm_sec = (time_to(curves[each], quality_ms) for each in (cold, warm))
            label = f"cold's end + {tolerance:.0%}"
            ratio = cold_sec / warm_sec if math.isfinite(warm_sec) else math.nan
            lines.append(f"| {warm} | {label} | {cold_sec:.0f} | {warm_sec:.0f} | {ratio:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
