"""What memory saves: the same network again, and siblings of it, each in a fresh process.

    python -m benchmarks.micro.warm_start resnet18 --budget 10m --out runs/warm
    python -m benchmarks.micro.warm_start transformer --sibling sequence=64 --out runs/warm
    python -m benchmarks.micro.warm_start resnet18 --sibling resnet50 --no-again --out runs/warm

Runs, in this order: the network without memory, which fills a store; the same network
with that store; and each sibling (another network, or the same in another size) without
memory and with the store as the first run left it. Give runs with memory fewer seconds
(``--warm-budget``): in the end the networks of each pair are timed in interleaved rounds,
and one with memory that is as fast after a third of the seconds took at most that third.
The sums of tasks over the seconds, as recorded, are given, too, but runs that follow each
other on a machine whose speed changes cannot be compared by them. Killed, the same
command goes on: runs that are finished are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import write_figure
from tvm_adaptive.cli.arguments import parse_duration
from tvm_adaptive.database.location import NO_STORE
from tvm_adaptive.measure_callback.journal import read_journal
from tvm_adaptive.models import BUILTIN
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.target import n_cores_of, resolve_target
from tvm_adaptive.tuning.tune import tune_relax
from tvm_adaptive.tuning.turns import time_in_turns
from tvm_adaptive.workers.cores import thread_env

STORE = "records.db"
HEADER = """
| | cold, s, all included | warm, s | x | cold, ms | warm, ms | warm over cold, of a round |
|---|---|---|---|---|---|---|"""
# Two runs that end at the same speed differ by as much in what they recorded.
TOLERANCES = (0.0, 0.02, 0.05)


@dataclasses.dataclass(frozen=True)
class Sibling:
    """A network that has tasks like those of another one's."""

    network: str
    sizes: Mapping[str, int]

    @property
    def label(self) -> str:
        """Return what folders and tables call it."""
        return "-".join([self.network, *(f"{key}{value}" for key, value in self.sizes.items())])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="what memory saves")
    parser.add_argument("network", choices=list(BUILTIN))
    parser.add_argument(
        "--sibling", action="append", default=[], metavar="NETWORK or OPTION=N", help="repeatable"
    )
    parser.add_argument("--no-again", action="store_true", help="siblings only")
    parser.add_argument("--budget", type=parse_duration, default=600.0, metavar="TIME")
    parser.add_argument("--warm-budget", type=parse_duration, metavar="TIME", help="of warm runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=24, help="of interleaved timings; 0: none")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", help=argparse.SUPPRESS)  # this process is one of the runs
    options = parser.parse_args(arguments)
    if options.run:
        tune_once(json.loads(options.run))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    pairs = [] if options.no_again else [("cold", "warm")]
    specs = list(plan(options))
    for spec in specs:
        run_process(options.out, spec)
    pairs += [(f"{each.label}-cold", f"{each.label}-warm") for each in siblings_of(options)]
    print(table(options.out, [spec["name"] for spec in specs], pairs))
    if options.rounds:
        by_name = {spec["name"]: spec for spec in specs}
        print(HEADER)
        for cold, warm in pairs:
            timed = time_pair(options.out, by_name[cold], by_name[warm], options.rounds)
            print(row(options.out, cold, warm, timed), flush=True)
    return 0


def siblings_of(options: argparse.Namespace) -> list[Sibling]:
    """Return the siblings of a command line; sizes together make one."""
    networks = [Sibling(each, {}) for each in options.sibling if "=" not in each]
    if unknown := [each.network for each in networks if each.network not in BUILTIN]:
        raise SystemExit(f"There is no network {unknown[0]}; there are {', '.join(BUILTIN)}.")
    parts = [each.partition("=") for each in options.sibling if "=" in each]
    sizes = {key: int(value) for key, _, value in parts}
    return networks + ([Sibling(options.network, sizes)] if sizes else [])


def plan(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what each run is, in their order."""
    store = str(options.out / STORE)
    warm_sec = options.warm_budget or options.budget
    me = Sibling(options.network, {})
    runs = [("cold", me, store, options.budget)]
    if not options.no_again:
        runs.append(("warm", me, f"{store}.warm", warm_sec))
    for each in siblings_of(options):
        runs.append((f"{each.label}-cold", each, NO_STORE, options.budget))
        runs.append((f"{each.label}-warm", each, f"{store}.{each.label}", warm_sec))
    for number, (name, what, used, budget_sec) in enumerate(runs):
        is_warm = used not in (store, NO_STORE)
        yield {
            "name": name,
            "network": what.network,
            "sizes": dict(what.sizes),
            "store": used,
            "knows": store if is_warm else "",
            "budget_sec": budget_sec,
            "seed": options.seed + number,
            "out": str(options.out / name),
            # Made anew if the network or the budget of what it knows changes.
            **({"of": [options.network, options.budget]} if is_warm else {}),
        }


def run_process(out: Path, spec: dict[str, Any]) -> None:
    """Do one run in a fresh process, unless it is finished already."""
    done = out / f"{spec['name']}.json"
    if done.exists() and json.loads(done.read_text()) == spec:
        return
    shutil.rmtree(spec["out"], ignore_errors=True)
    if spec["store"] != NO_STORE:
        for suffix in ("", "-wal", "-shm"):  # of a run that was killed
            Path(f"{spec['store']}{suffix}").unlink(missing_ok=True)
    if spec["knows"]:  # what one run adds must not help another
        shutil.copy(spec["knows"], spec["store"])
    env = {**os.environ, **thread_env(n_cores_of(resolve_target("cpu")))}
    command = [sys.executable, "-m", "benchmarks.micro.warm_start", spec["network"]]
    with open(out / f"{spec['name']}.log", "wb") as log:
        subprocess.run(
            [*command, "--out", str(out), "--run", json.dumps(spec)],
            stdout=log,
            stderr=log,
            env=env,
            check=True,
        )
    done.write_text(json.dumps(spec))


def tune_once(spec: dict[str, Any]) -> None:
    """Tune, in this process."""
    network = BUILTIN[spec["network"]](**spec["sizes"])
    tune_relax(
        network.mod,
        network.params,
        work_dir=spec["out"],
        budget_sec=spec["budget_sec"],
        seed=spec["seed"],
        # A store brings starter records with it, which a run without one does not have.
        config=DEFAULT.replace(store=spec["store"], use_all=True, starter=False),
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


def table(out: Path, names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> str:
    """Return what each run reached and when, and pairs' ratios, as Markdown."""
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
    for cold, warm in pairs:
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


def time_pair(
    out: Path, cold: Mapping[str, Any], warm: Mapping[str, Any], rounds: int
) -> dict[str, list[float]]:
    """Time the networks of two runs in turns, unless it was done; milliseconds by rounds."""
    kept = out / f"{warm['name']}.rounds.json"
    if kept.exists() and (known := json.loads(kept.read_text()))["runs"] == [cold, warm]:
        return dict(known["ms"])
    names = (str(cold["name"]), str(warm["name"]))
    n_threads = n_cores_of(resolve_target("cpu"))
    libraries = {name: (out / name / "network.so", n_threads) for name in names}
    inputs = BUILTIN[cold["network"]](**cold["sizes"]).random_inputs()
    secs = time_in_turns(libraries, inputs, rounds)
    samples = {name: [1e3 * sec for sec in each] for name, each in secs.items()}
    write_figure(kept, {"runs": [cold, warm], "ms": samples})
    return samples


def row(out: Path, cold: str, warm: str, timed: Mapping[str, Sequence[float]]) -> str:
    """Return a pair's seconds and times, rounds paired, as a line below :data:`HEADER`."""
    seconds = [read_journal(out / name / "journal.jsonl")[-1]["time_sec"] for name in (cold, warm)]
    low, middle, high = np.quantile(np.divide(timed[warm], timed[cold]), [0.1, 0.5, 0.9])
    cells = [
        warm,
        *(f"{each:.0f}" for each in seconds),
        f"{seconds[0] / seconds[1]:.1f}",
        *(f"{np.median(timed[name]):.2f}" for name in (cold, warm)),
        f"{middle:.3f} ({low:.2f} to {high:.2f})",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
