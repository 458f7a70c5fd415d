"""Take real models through all stages: import, prepare, compile, compare.

``python -m benchmarks.zoo.models rows.jsonl [NAME ...]`` continues the file: a model and export
that are in it are not run again, unless ``--again`` says so for those
that did not agree, or weakly.
``--table`` prints the table of the documentation from it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import re
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.rows import append_row, read_rows
from benchmarks.tables import markdown
from benchmarks.zoo.catalog import EXPORTS, FILE, MODELS, Model
from benchmarks.zoo.stages import take

LIMIT_SEC = 420.0
_MEMORY_BYTES = 12 << 30
_SHORT = 160
# Exporters colour what they write.
_COLOURS = re.compile("\x1b?\\[[0-9;]+m")
# A hundred times the absolute tolerance.
_LEAST_SIZE = 1e-4


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("names", nargs="*", help="beginnings of package/name")
    parser.add_argument("--exports", nargs="+", choices=list(EXPORTS), default=list(EXPORTS))
    parser.add_argument(
        "--again", action="store_true", help="also those that did not agree, or weakly"
    )
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    # A shell lets programs in the background ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = read_rows(options.rows, "model", "export")
    if options.table:
        print(table(list(rows.values())))
        return
    _import_frameworks()
    for model, export in _wanted(options.names, options.exports):
        known = rows.get((model.key, export))
        is_good = known is not None and known["agrees"] and not _is_weak(known)
        if known is not None and (is_good or not options.again):
            continue
        row = {"model": model.key, "export": export, **run(model, export)}
        append_row(options.rows, row)
        print(f"{model.key} {export}: {_state(row)} {row.get('message', '')}", flush=True)


def _wanted(names: Sequence[str], exports: Sequence[str]) -> Iterator[tuple[Model, str]]:
    """Yield models and exports: the first export of all models comes first."""
    chosen = [each for each in MODELS if not names or any(map(each.key.startswith, names))]
    for place, export in enumerate(exports):
        for model in chosen:
            if not model.file:
                yield model, export
            elif place == 0:
                yield model, FILE


def run(model: Model, export: str) -> dict[str, Any]:
    """Run a model in a process of its own; a crash or a hang is a result."""
    context = multiprocessing.get_context("fork")  # which has imported what it needs
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_take, args=(sender, model, export))
    process.start()
    sender.close()
    stage = "export"
    end_sec = time.monotonic() + LIMIT_SEC
    try:
        while receiver.poll(max(end_sec - time.monotonic(), 0.0)):
            found = receiver.recv()
            if isinstance(found, dict):
                return found
            stage = found
        why = f"it took more than {LIMIT_SEC:.0f} s"
    except EOFError:
        process.join()
        why = f"the process ended with {process.exitcode}"
    finally:
        # It leads a group of those that it started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    runs = stage not in ("export", "framework")
    return {"stage": stage, "agrees": False, "message": why, "framework_runs": runs}


def _take(sender: Connection, model: Model, export: str) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # exporters print
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    sender.send(take(model, export, sender.send))


def _import_frameworks() -> None:
    """Import once what each model needs; those that are missing fail later."""
    for name in ("torch", "torchvision", "timm", "transformers.modeling_utils", "onnxscript"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _state(row: dict[str, Any]) -> str:
    if row["agrees"]:
        return "weak" if _is_weak(row) else "agrees"
    if row["stage"] == "export":
        return "no export"
    return f"fails: {row['stage']}" if row.get("framework_runs", True) else "framework fails"


def _is_weak(row: dict[str, Any]) -> bool:
    """Say whether outputs agree that are all the same, or hardly more than the tolerance."""
    return bool(row.get("is_constant")) or row.get("size", 0.0) < _LEAST_SIZE


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table: for each model, what became of each export, and why not."""
    found = {(row["model"], row["export"]): row for row in rows}
    versions = sorted({row["version"] for row in rows if "version" in row})
    columns = [FILE, *EXPORTS]
    ran = [row for row in rows if row["stage"] != "export" and row.get("framework_runs", True)]
    agree = [row for row in ran if row["agrees"]]
    n_weak = sum(map(_is_weak, agree))
    models = {row["model"] for row in ran}
    summary = (
        f"With {', '.join(versions)}: {len(models)} of {len(MODELS)} models were run, in "
        f"{len(ran)} files that their framework runs; {len(agree)} files are imported and agree, "
        f"{n_weak} of them weakly."
    )
    lines = []
    for model in MODELS:
        mine = [found.get((model.key, column)) for column in columns]
        known = [row for row in mine if row is not None]
        if not known:
            continue
        cells = ["" if row is None else _state(row) for row in mine]
        errors = [
            row["max_error"] / (row["size"] or 1.0) for row in known if row.get("size") is not None
        ]
        why = "; ".join(dict.fromkeys(_why(row) for row in known if not row["agrees"]))
        most = f"{max(errors):.1g}" if errors else ""
        lines.append([model.key, *cells, most, why])
    return f"{summary}\n\n{markdown(['model', *columns, 'difference', 'why not'], lines)}"


def _why(row: dict[str, Any]) -> str:
    text = _COLOURS.sub("", str(row.get("message", ""))).replace("|", "/").replace("\n", " ")
    # Nodes of PyTorch's graphs read like links: [target=...](args = ...).
    return f"{row['export']}: {text[:_SHORT]}".replace("](", "]\\(")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # the rest is run another time
        main()
