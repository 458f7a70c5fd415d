"""Count the transposes and copies that preparation leaves in real models, and how much they move.

    python -m benchmarks.micro.copies runs/copies
    python -m benchmarks.micro.copies runs/copies --models resnet18 net.onnx rapidocr/
    python -m benchmarks.micro.copies runs/copies --table

Models are those of ``peers`` and ``zoo``, by their names or the beginnings of these, or files. A
function counts that has nothing but copies, or a concatenation. Killed, the command goes on where
it was; models that are there are not prepared again.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import origin
from benchmarks.micro.gap import blocks_of, own_works
from benchmarks.micro.gap_groups import CONCAT, COPY, Block
from benchmarks.peers.models import MODELS as PEERS
from benchmarks.rows import append_row, read_rows
from benchmarks.tables import markdown
from benchmarks.zoo.catalog import EXPORTS, FILE
from benchmarks.zoo.catalog import MODELS as ZOO
from benchmarks.zoo.stages import file_of
from tvm_adaptive._tvm import IRModule, args_info_of, bindings_of, relax
from tvm_adaptive.errors import summary_line
from tvm_adaptive.models import Network, call_counts, prepare
from tvm_adaptive.models.frontend import load
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.target import resolve_target

ROWS_FILE = "rows.jsonl"
TRANSPOSE, OTHER = "transpose", "other copy"
_KINDS = (TRANSPOSE, CONCAT, OTHER)
# Of operators, in a model as it is imported.
_TRANSPOSES = {"relax.permute_dims", "relax.layout_transform"}
# Of functions that are named in the table.
_MOST_NAMED = 4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.copies", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", metavar="MODEL", default=(), help="default: all")
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    options = parser.parse_args(arguments)
    rows = read_rows(options.out / ROWS_FILE, "model")
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        for name, row in new_rows(options.models, options.out, rows):
            rows[name] = {"model": name, **origin(), **row}
            append_row(options.out / ROWS_FILE, rows[name])
            print(table([rows[name]]).splitlines()[-1], flush=True)
    print(table(list(rows.values())))
    return 0


def new_rows(
    names: Sequence[str], out: Path, known: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of models without one; an error takes the place of its numbers."""
    for peer in PEERS:
        if _is_wanted(peer.name, names, known):
            try:
                path = peer.file(out / "models")
            except Exception as error:  # a package that is missing
                yield peer.name, {"error": summary_line(error)}
            else:
                yield peer.name, row_of_file(path, peer.shapes)
    for model in ZOO:
        if _is_wanted(model.key, names, known):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    export = FILE if model.file else EXPORTS[0]
                    path, shapes = file_of(model, export, Path(folder))
                except Exception as error:  # a package that is missing, or an exporter's own
                    yield model.key, {"error": summary_line(error)}
                else:
                    yield model.key, row_of_file(path, shapes)
    for name in names:
        if Path(name).is_file() and name not in known:
            yield name, row_of_file(Path(name), {})


def _is_wanted(name: str, names: Sequence[str], known: Mapping[str, Any]) -> bool:
    return name not in known and (not names or any(map(name.startswith, names)))


def row_of_file(path: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Prepare a model, and return what only moves data before and after."""
    try:
        network = load(str(path), shapes)
        assert isinstance(network, Network)
        prepared = prepare(network, resolve_target("cpu"), **DEFAULT.preparation)
    except Exception as error:  # of any kind; it is a result
        return {"error": summary_line(error)}
    return {"imported": transposes_of(network.mod), **left(prepared.mod, prepared.layout)}


def transposes_of(mod: IRModule) -> int:
    """Count the operators of a model that only change the order of axes."""
    functions = [each for each in mod.functions.values() if isinstance(each, relax.Function)]
    values = [binding.value for function in functions for binding in bindings_of(function)]
    names = [getattr(getattr(value, "op", None), "name", "") for value in values]
    return sum(name in _TRANSPOSES for name in names)


def left(mod: IRModule, layout: str) -> dict[str, Any]:
    """Return the calls that only move data in a prepared network, by kind, and their share."""
    works, calls = own_works(mod, layout), call_counts(mod)
    found: Counter[str] = Counter()
    moved: dict[str, float] = {}
    rest = 0.0
    for name, n_calls in calls.items():
        work, n_bytes = works[name]
        if work.signature.kind not in (COPY, CONCAT):
            rest += n_calls * n_bytes
            continue
        blocks = blocks_of(mod[name])
        found[kind_of(blocks)] += n_calls
        last = "x".join(map(str, blocks[-1].shape))
        # Read and written: rows that are looked up are a small part of their table.
        *_, result = args_info_of(IRModule({"main": mod[name]}))
        n_result = math.prod(map(int, result.shape)) * np.dtype(str(result.dtype)).itemsize
        moved[f"{n_calls} x {name} ({last})"] = 2.0 * n_calls * n_result
    total = rest + sum(moved.values())
    return {
        "calls": sum(calls.values()),
        "left": {kind: found[kind] for kind in _KINDS},
        "share": sum(moved.values()) / total if total else 0.0,
        "most": sorted(moved, key=moved.__getitem__, reverse=True)[:_MOST_NAMED],
    }


def kind_of(blocks: Sequence[Block]) -> str:
    """Say what a function without computation does, by the names of its blocks in TOPI."""
    names = [block.name for block in blocks]
    if any("concat" in name for name in names):
        return CONCAT
    return TRANSPOSE if any("transpose" in name for name in names) else OTHER


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table in Markdown."""
    columns = ["model", "transposes in the model", "calls after preparation"]
    columns += ["transposes", "concatenations", "other copies", "share of all bytes", "the largest"]
    lines = []
    for row in rows:
        if "error" in row:
            lines.append([row["model"], *[""] * (len(columns) - 2), row["error"]])
            continue
        counts = [row["imported"], row["calls"], *(row["left"][kind] for kind in _KINDS)]
        cells = [row["model"], *map(str, counts), f"{100.0 * row['share']:.1f} %"]
        lines.append([*cells, ", ".join(row["most"])])
    return markdown(columns, lines)


if __name__ == "__main__":
    sys.exit(main())
