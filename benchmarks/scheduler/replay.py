"""Replay recorded tunings under each scheduler: who brings the latency down soonest.

    python -m benchmarks.scheduler.replay benchmarks/data/*.npz --seeds 20 --out result

Writes ``result.json`` (every run), ``result.md`` (tables) and ``result.svg`` (curves).
Files of the same network are replayed together: each seed draws, for each task, one of its
recordings. All policies see the same course of events per seed.

Per network: median seconds to within 5 % and 1 % of the final latency (the best of the
full recordings), how many seeds did not get there (they count with the horizon, 1.25 times
the recording's seconds), and the area under the latency curve (mean latency over the
horizon, relative to the final one). Across networks: geometric means of the paired ratios
to the reference, per network their median over seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.charts import Chart, Figure, Line
from benchmarks.machine import origin
from benchmarks.scheduler.metrics import latency_at, mean_latency_ms, time_to_within
from benchmarks.scheduler.oracle import OraclePolicy
from benchmarks.scheduler.recordings import load_recording
from benchmarks.scheduler.static import static
from benchmarks.stats import (
    Interval,
    geometric_mean,
    geometric_mean_interval,
    median_interval,
)
from benchmarks.svg import save_svg
from benchmarks.tables import bounds, markdown
from tvm_adaptive.task_scheduler.arms import Policy
from tvm_adaptive.task_scheduler.baselines import (
    GradientPolicy,
    at_random,
    linear,
    round_robin,
)
from tvm_adaptive.task_scheduler.policy import DEFAULT, PAPER, DynaTunePolicy, PolicyOptions
from tvm_adaptive.testing.recording import Recording
from tvm_adaptive.testing.replay import ReplayRun, replay

# A policy may spend longer than the recording did: small batches search more often.
HORIZON = 1.25
CURVE_POINTS = 120
SHARES = {"to_5": 0.05, "to_1": 0.01}

# Of the final latency: what is above is the warm-up, of which the tables tell.
_TOP = 1.5

# Recordings, seed, batch -> a fresh policy.
Maker = Callable[[Sequence[Recording], int, int], Policy]


def tuned(preset: PolicyOptions, **changes: Any) -> Maker:
    return lambda _recordings, _seed, batch: DynaTunePolicy(
        dataclasses.replace(preset, slot_trials=batch, **changes)
    )


def allotted(name: str) -> Maker:
    return lambda recordings, _seed, batch: static(name, recordings[0].n_trials // batch)


POLICIES: dict[str, Maker] = {
    "default": tuned(DEFAULT),
    "paper": tuned(PAPER),
    "paper, quadrature": tuned(PAPER, method="quadrature"),
    "gradient": lambda *_: GradientPolicy(),
    "round-robin": lambda *_: round_robin(),
    "random": lambda *_: at_random(),
    "linear": lambda *_: linear(),
    "round-robin, static": allotted("round-robin"),
    "random, static": allotted("random"),
    "linear, static": allotted("linear"),
    "epsilon-greedy": tuned(DEFAULT, index="epsilon-greedy"),
    "softmax": tuned(DEFAULT, index="softmax"),
    "ucb": tuned(DEFAULT, index="ucb"),
    # Ablations: one knob at a time.
    "default, blind to peers": tuned(DEFAULT, peer_margin=None),
    "default, records": tuned(DEFAULT, method="records"),
    "oracle": lambda recordings, seed, batch: OraclePolicy(recordings, seed, batch=batch),
    # Of a figure only.
    "round-robin, patience": lambda *_: round_robin(patience_trials=200),
    "random, patience": lambda *_: at_random(patience_trials=200),
}
# What the page's table has; the paper's preset is slow.
STANDARD = [name for name in POLICIES if name != "paper" and not name.endswith("patience")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=STANDARD)
    parser.add_argument("--paper", action="store_true", help="add the paper preset (slow)")
    parser.add_argument("--reference", choices=list(POLICIES), default="gradient")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--batch", type=int, help="default: the recording's")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="without a suffix")
    options = parser.parse_args()
    names = [*options.policies, *(["paper"] if options.paper else [])]
    if options.reference not in names:
        parser.error(f"the reference, {options.reference}, must be among the policies")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    networks = by_network(options.recordings)
    rows = run_all(networks, names, options)
    summary = summarise(rows, options.reference)
    write(options, networks, rows, summary)
    print(options.out.with_suffix(".md").read_text())


# Replays change nothing of a recording.
_load = functools.cache(load_recording)


def by_network(paths: Sequence[Path]) -> dict[str, list[Path]]:
    networks: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        networks[_load(path).network].append(path)
    return dict(networks)


def run_all(
    networks: dict[str, list[Path]], names: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    jobs = [
        (network, tuple(paths), name, seed, options.batch)
        for network, paths in networks.items()
        for name in names
        for seed in range(options.seeds)
    ]
    if options.jobs == 1:
        return [one_run(*job) for job in jobs]
    with ProcessPoolExecutor(options.jobs) as pool:
        return list(pool.map(one_run, *zip(*jobs, strict=True), chunksize=4))


def one_run(
    network: str, paths: Sequence[Path], name: str, seed: int, batch: int | None
) -> dict[str, Any]:
    recordings = [_load(path) for path in paths]
    size = batch or recordings[0].batch
    run = replay(recordings, POLICIES[name](recordings, seed, size), seed, batch=size)
    horizon = HORIZON * max(recording.total_sec for recording in recordings)
    row: dict[str, Any] = {"network": network, "policy": name, "seed": seed, "ended": run.ended}
    for key, share in SHARES.items():
        row[f"{key}_sec"] = time_to_within(run, share, horizon)
    row["area"] = mean_latency_ms(run, horizon) / run.final_ms
    row["decision_ms"] = float(run.decide_sec.mean() * 1e3)
    row["curve"] = curve(run, horizon)
    row["horizon_sec"] = horizon
    return row


def curve(run: ReplayRun, horizon: float) -> list[float]:
    times = np.linspace(0.0, horizon, CURVE_POINTS)
    return [round(latency_at(run, float(time)) / run.final_ms, 4) for time in times]


def summarise(rows: Sequence[dict[str, Any]], reference: str) -> dict[str, Any]:
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cells[row["network"], row["policy"]].append(row)
    networks = list(dict.fromkeys(row["network"] for row in rows))
    names = list(dict.fromkeys(row["policy"] for row in rows))
    table = {
        network: {name: cell_of(cells[network, name], cells[network, reference]) for name in names}
        for network in networks
    }
    overall = {
        name: {
            key: geometric_mean_interval([table[network][name][key] for network in networks])
            for key in ("to_5_speedup", "to_1_speedup")
        }
        | {
            "area": geometric_mean([table[network][name]["area"] for network in networks]),
            "worst_to_5_speedup": min(
                (table[network][name]["to_5_speedup"] for network in networks),
                key=lambda each: (each.low, each.high),
            ),
        }
        for name in names
    }
    return {"reference": reference, "networks": table, "overall": overall}


def cell_of(own: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> dict[str, Any]:
    cell: dict[str, Any] = {}
    for key in SHARES:
        cell[f"{key}_sec"] = median_interval([row[f"{key}_sec"] for row in own])
        cell[f"{key}_missed"] = sum(not row[f"{key}_sec"].is_exact for row in own)
        # The same seed is the same course of events, so pairs are compared.
        cell[f"{key}_speedup"] = median_interval(
            [
                theirs[f"{key}_sec"].over(ours[f"{key}_sec"])
                for ours, theirs in zip(own, other, strict=True)
            ]
        )
    for key in ("area", "decision_ms"):
        cell[key] = statistics.median(row[key] for row in own)
    return cell


def write(
    options: argparse.Namespace,
    networks: dict[str, list[Path]],
    rows: Sequence[dict[str, Any]],
    summary: dict[str, Any],
) -> None:
    about = {
        "recordings": {
            network: [
                {
                    "file": path.name,
                    "machine": _load(path).machine,
                    "tvm": _load(path).tvm,
                    "seconds": _load(path).total_sec,
                    "trials": _load(path).n_trials,
                }
                for path in paths
            ]
            for network, paths in networks.items()
        },
        **origin(),
        "seeds": options.seeds,
    }
    slim = [{key: value for key, value in row.items() if key != "curve"} for row in rows]
    found = {"about": about, "summary": summary, "runs": slim}
    text = json.dumps(found, indent=1, default=_as_pair)
    options.out.with_suffix(".json").write_text(text)
    options.out.with_suffix(".md").write_text("\n".join(tables(summary)) + "\n")
    save_svg(figure_of(rows, options.out.name), options.out.parent)


def _as_pair(value: Interval) -> list[float]:
    """Return how a time or ratio is written down: its two bounds."""
    return [value.low, value.high]


def tables(summary: dict[str, Any]) -> list[str]:
    reference = summary["reference"]
    head = ["policy", f"to 5 %, x faster than {reference}", "worst network", "to 1 %, x", "area"]
    figures = ("to_5_speedup", "worst_to_5_speedup", "to_1_speedup")
    rows = [
        [name, *(bounds(row[each]) for each in figures), f"{row['area']:.3f}"]
        for name, row in summary["overall"].items()
    ]
    lines = [markdown(head, rows)]
    head = ["policy", "to 5 %, s", "not reached", "to 1 %, s", "not reached", "area"]
    for network, cells in summary["networks"].items():
        rows = [
            [
                name,
                *(bounds(cell["to_5_sec"]), str(cell["to_5_missed"])),
                *(bounds(cell["to_1_sec"]), str(cell["to_1_missed"])),
                f"{cell['area']:.3f}",
                f"{cell['decision_ms']:.2f}",
            ]
            for name, cell in cells.items()
        ]
        lines += ["", f"**{network}**", "", markdown([*head, "decision, ms"], rows)]
    return lines


def figure_of(rows: Sequence[dict[str, Any]], name: str) -> Figure:
    """Return the curves of each policy, medians over seeds, with a panel for each network."""
    panels = []
    for network in dict.fromkeys(row["network"] for row in rows):
        here = [row for row in rows if row["network"] == network]
        secs = tuple(np.linspace(0.0, here[0]["horizon_sec"], CURVE_POINTS))
        lines = []
        for policy in dict.fromkeys(row["policy"] for row in here):
            curve = np.median([row["curve"] for row in here if row["policy"] == policy], axis=0)
            shown = tuple(np.where(curve <= _TOP, curve, np.nan))
            is_thick = policy in ("default", "gradient", "oracle")
            lines.append(Line(policy, secs, shown, thick=is_thick, steps=True))
        panels.append(Chart(network, "seconds of tuning", "latency / final", tuple(lines)))
    return Figure(name, "Medians over seeds.", tuple(panels))


if __name__ == "__main__":
    main()
