"""Tune networks without some of what is done for them, and time the libraries.

    python -m benchmarks.ablation runs/starter --of starter --models resnet18 ppocr_det
    python -m benchmarks.ablation runs/preparation --of preparation --models resnet18 ppocr_det
    python -m benchmarks.ablation runs/starter --of starter --table

``starter``: what the first trials begin with. ``preparation``: how networks are lowered, one part
less from column to column. Each run is a command of its own with an empty record store: without
any, there are no starter records either. Then all libraries of a network are timed in turns, each
in a process that has tuned nothing. Killed, the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import COMMAND_LINE, has_ended, secs_in_turns, tuned_library
from benchmarks.machine import origin
from benchmarks.peers.models import MODELS, PeerModel
from benchmarks.rows import append_row, read_rows
from benchmarks.tables import markdown
from tvm_adaptive.cli.arguments import parse_duration

ROWS_FILE = "ablation.jsonl"
_ROUNDS = 15


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a network is tuned."""

    flags: tuple[str, ...] = ()  # of the command
    config: str = ""  # its configuration
    without: tuple[str, ...] = ()  # parts of ``ablation.plain``

    @property
    def program(self) -> tuple[str, ...]:
        """What Python runs."""
        return ("-m", "benchmarks.ablation.plain", ",".join(self.without)) if self.without else ()


_NO_ANALYTICAL = "[search]\nn_analytical = 0\n"
_NO_FORMS, _NO_VECTORS = ("--no-forms",), ("--no-forms", "--no-vector-math")
_AS_IMPORTED = (*_NO_VECTORS, "--no-prepack", "--layout", "keep")
# The first of each is what is done by default.
ABLATIONS: Mapping[str, Mapping[str, Variant]] = {
    "starter": {
        "both": Variant(),
        "starter records only": Variant(config=_NO_ANALYTICAL),
        "analytical candidates only": Variant(("--no-starter",)),
        "neither": Variant(("--no-starter",), _NO_ANALYTICAL),
        # Tasks with another epilogue are relatives, too.
        "nothing from relatives": Variant(config="[search]\nseeds = false\n"),
    },
    "preparation": {
        "all": Variant(),
        "without Winograd's form": Variant(_NO_FORMS),
        "and own operators": Variant(_NO_VECTORS, without=("operators",)),
        "and fusion": Variant(_NO_VECTORS, without=("operators", "fusion")),
        "and layout": Variant(_AS_IMPORTED, without=("operators", "fusion")),
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("out", type=Path)
    by_name = {each.name: each for each in MODELS}
    parser.add_argument("--of", choices=list(ABLATIONS), required=True)
    parser.add_argument("--models", nargs="+", choices=list(by_name), default=[])
    parser.add_argument("--budget", type=parse_duration, default=60.0, metavar="TIME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    options = parser.parse_args(arguments)
    variants = ABLATIONS[options.of]
    rows = {
        name: row
        for (name, *run), row in read_rows(
            options.out / ROWS_FILE, "model", "budget_sec", "seed"
        ).items()
        if run == [options.budget, options.seed] and list(row["secs"]) == list(variants)
    }
    for name in () if options.table else options.models:
        if name not in rows:
            rows[name] = row_of_model(by_name[name], variants, options)
            append_row(options.out / ROWS_FILE, rows[name])
    print(table(list(variants), list(rows.values())))
    return 0


def row_of_model(
    model: PeerModel, variants: Mapping[str, Variant], options: argparse.Namespace
) -> dict[str, Any]:
    """Tune a network in each variant, time the libraries, and return the row of the file."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = model.file(options.out / "models")
    libraries: dict[str, Path] = {}
    for number, (name, variant) in enumerate(variants.items()):
        file = options.out / f"{number}.toml"
        file.write_text(variant.config, encoding="utf-8")
        run = f"{options.of}-{options.budget:g}s-{options.seed}"
        work_dir = options.out / f"{model.name}-{run}-{number}"
        extra = (*variant.flags, "--config", str(file), "--store", str(empty_store(work_dir)))
        program = variant.program or COMMAND_LINE
        libraries[name] = tuned_library(model, path, work_dir, options, extra, program=program)
    return {
        "model": model.name,
        "budget_sec": options.budget,
        "seed": options.seed,
        **origin(),
        "secs": secs_in_turns(libraries, path, model.shapes, _ROUNDS),
    }


def empty_store(work_dir: Path) -> Path:
    """Return the path of a run's record store, without what a run that was cut short left there."""
    store = work_dir.with_suffix(".db")
    if not has_ended(work_dir):
        for path in work_dir.parent.glob(f"{store.name}*"):
            path.unlink()
    return store


def table(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table in Markdown; above 1, a variant is slower than the first."""
    first, *others = names
    lines = []
    for row in rows:
        base = row["secs"][first]
        cells = [f"{1e3 * statistics.median(base):.3g} ms"]
        for name in others:
            ratios = [a / b for a, b in zip(row["secs"][name], base, strict=True)]
            low, high = min(ratios), max(ratios)
            cells.append(f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")
        lines.append([row["model"], *cells])
    return markdown(["network", *names], lines)


if __name__ == "__main__":
    sys.exit(main())
