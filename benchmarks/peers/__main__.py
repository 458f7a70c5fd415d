"""Tune real models, and time the libraries in turns with what a user would take instead.

    python -m benchmarks.peers runs/peers --budget 10m
    python -m benchmarks.peers runs/peers --table
    python -m benchmarks.peers runs/peers --budget 10m --picture peers.svg

Each model is tuned by a command of its own without a record store. Then its library is compiled
and timed anew, three times, by processes that have tuned nothing: each time in seven rounds with
ONNX Runtime, OpenVINO, PyTorch and PyTorch's compiler. Killed, the same command goes on where it
was. ``--table`` prints the table of what is there, ``--picture`` draws that of one budget and seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import GRACE_SEC, run, tune
from benchmarks.machine import origin
from benchmarks.peers.models import MODELS, OTHERS, PeerModel
from benchmarks.peers.picture import picture
from benchmarks.peers.table import row_of, table
from benchmarks.rows import append_row, read_rows
from tvm_adaptive.cli.arguments import parse_count, parse_duration
from tvm_adaptive.cli.console import EXIT_OK
from tvm_adaptive.measure_callback.journal import read_journal
from tvm_adaptive.models.frontend import PEERS
from tvm_adaptive.tuning.checks.peers import PEER_ERROR
from tvm_adaptive.tuning.deploy import APPLY_FILE
from tvm_adaptive.tuning.manifest import MANIFEST_FILE

ROWS_FILE = "rows.jsonl"
# Each compiles the network anew: where its memory lies also counts.
_TIMINGS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", metavar="MODEL", default=(), help="default: fifteen")
    parser.add_argument("--others", action="store_true", help="ten files of other packages instead")
    parser.add_argument("--budget", type=parse_duration, default=600.0, metavar="TIME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timings", type=parse_count, default=_TIMINGS)
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw an SVG, run nothing")
    options = parser.parse_args(arguments)
    unknown = set(options.models) - {each.name for each in (*MODELS, *OTHERS)}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    rows = read_rows(options.out / ROWS_FILE, "model", "budget_sec", "seed")
    if options.picture is not None:
        wanted = (options.budget, options.seed)
        chosen = [row_of(row) for (_, *run), row in rows.items() if tuple(run) == wanted]
        options.picture.write_text(picture(chosen), encoding="utf-8")
        return EXIT_OK
    if not options.table:
        named = [each for each in (*MODELS, *OTHERS) if each.name in options.models]
        for model in named or (OTHERS if options.others else MODELS):
            key = (model.name, options.budget, options.seed)
            if key in rows and "error" not in rows[key]:
                continue
            row = row_of_model(model, options)
            append_row(options.out / ROWS_FILE, row)
            rows[key] = row
            print(table([row_of(row)]), flush=True)
    print(table([row_of(each) for each in rows.values()]))
    return EXIT_OK


def row_of_model(model: PeerModel, options: argparse.Namespace) -> dict[str, Any]:
    """Tune a model and time it; return the row of the file."""
    row: dict[str, Any] = {
        "model": model.name,
        "budget_sec": options.budget,
        "seed": options.seed,
        **origin(),
    }
    try:
        path = model.file(options.out / "models")
        work_dir = options.out / f"{model.name}-{options.budget:g}s-{options.seed}"
        tune(model, path, work_dir, options)
        row["timings"] = []
        for _ in range(options.timings):
            comparison, left_out = timing(work_dir, options.out / "deploy" / model.name)
            row["timings"].append(comparison)
            # A framework that cannot read such files is not expected in the row.
            able = {each.framework for each in PEERS.values() if path.suffix in each.open}
            found = {name: why for name, why in left_out.items() if name in able}
            row["left_out"] = {**row.get("left_out", {}), **found}
    except (
        subprocess.CalledProcessError,
        subprocess.TimeoutExpired,
        OSError,
        ImportError,
    ) as error:
        row["error"] = str(error)
    return row


def timing(work_dir: Path, deployed: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Compile a run's records to a library and compare it with the peers.

    Returns
    -------
    (comparison, left_out)
        As the manifest has it, and why a framework is not part of it.
    """
    run(["apply", str(work_dir), "--out", str(deployed)], GRACE_SEC)
    found = json.loads((deployed / MANIFEST_FILE).read_text(encoding="utf-8"))["comparison"]
    if found is None:
        raise OSError("the deployed library was not timed")
    events = read_journal(deployed / APPLY_FILE)
    begins = max(n for n, event in enumerate(events) if event["event"] == "journal")
    if n_late := sum(event["event"] == "playoff" for event in events[begins:]):
        raise OSError(f"apply held {n_late} play-offs that the run had no time for")
    left_out = {
        event["where"].removeprefix(PEER_ERROR): event["message"]
        for event in events[begins:]
        if event["event"] == "error" and event["where"].startswith(PEER_ERROR)
    }
    return found, left_out


if __name__ == "__main__":
    sys.exit(main())
