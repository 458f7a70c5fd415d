"""Build winners into libraries to be timed: `python -m benchmarks.winners PLAN`.

A process of its own: what it imports and compiles must not stay while others are timed.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.configs import config_of
from benchmarks.journals import is_among
from benchmarks.methods import METHODS
from tvm_adaptive._tvm import Target, args_info_of, functions_as_tasks, json_database
from tvm_adaptive._tvm.tensor_functions import weights_of
from tvm_adaptive.models import (
    Network,
    TIRWorkload,
    compile_network,
    compile_tir,
    export,
    load_workload,
    prepare,
)
from tvm_adaptive.models.compile import device_kind
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.values.run_folder import FINAL_DIR, RECORD_FILE, WORKLOAD_FILE

# MetaSchedule records a failed trial as 1e10 s, and would take it for want of another.
_FAILED_SEC = 1e9
# Writes the library of an entry of a plan, with its records.
_Build = Callable[[Mapping[str, Any], Any, Path], None]


def main(plan_path: Path) -> int:
    """Build all entries of a plan; what became of each goes to ``built.json`` beside it."""
    plan = json.loads(plan_path.read_text())
    target = resolve_target(plan["target"])
    workload = load_workload(plan["workload"])
    built: dict[str, Any] = {"device": device_kind(target), "entries": {}}
    build = (
        _operator_builder(workload, target, built)
        if isinstance(workload, TIRWorkload)
        else _network_builder(workload, target)
    )
    for number, (name, entry) in enumerate(plan["entries"].items()):
        path = plan_path.parent / f"{number}.so"
        try:
            with tempfile.TemporaryDirectory() as scratch:
                build(entry, _database(entry, Path(scratch)), path)
            built["entries"][name] = {"path": str(path)}
        except Exception as error:  # one winner that cannot be built must not cost the others
            message = (str(error).strip() or repr(error)).splitlines()[-1]
            built["entries"][name] = {"error": message}
    (plan_path.parent / "built.json").write_text(json.dumps(built, indent=1))
    return 0


def _operator_builder(workload: TIRWorkload, target: Target, built: dict[str, Any]) -> _Build:
    """Return what builds an operator; notes what all its libraries take."""
    mod = functions_as_tasks(workload.mod, target)[0].dispatched[0]
    built["weights"] = weights_of(mod)
    built["buffers"] = [[str(arg.dtype), [int(n) for n in arg.shape]] for arg in args_info_of(mod)]

    def build(entry: Mapping[str, Any], database: Any, path: Path) -> None:
        if entry["folder"] is not None and database is None:
            raise ValueError("there are no more records")
        compile_tir(mod, target, database).export_library(str(path))

    return build


def _network_builder(network: Network, target: Target) -> _Build:
    """Return what builds a network, which is prepared once for all methods that do it alike."""

    @functools.cache
    def prepared_with(**options: Any) -> Any:
        return prepare(network, target, **options)

    def build(entry: Mapping[str, Any], database: Any, path: Path) -> None:
        prepared = prepared_with(**config_of(METHODS[entry["method"] or "default"]).preparation)
        export(compile_network(prepared, database, target), path)

    return build


def cut_database(
    source: Path,
    copy: Path,
    n_records: int | None,
    rank: int = 1,
    refuted_ms: Sequence[float] = (),
) -> int:
    """Copy a JSON database as it was after so many trials, failed ones left out.

    Parameters
    ----------
    source, copy : Path
        Folders; ``copy`` exists.
    n_records : int or None
        MetaSchedule writes one record per trial, in order. None for all.
    rank : int, default 1
        Above 1, the records that are faster are left out, too: of one task.
    refuted_ms : sequence of float
        Of records that computed something else, which are left out.

    Returns
    -------
    int
        Records that were copied.
    """
    shutil.copy(source / WORKLOAD_FILE, copy / WORKLOAD_FILE)
    lines = (source / RECORD_FILE).read_text().splitlines()[:n_records]
    times = [(line, _seconds_of(line)) for line in lines if line.strip()]
    good = [
        line for line, sec in times if sec < _FAILED_SEC and not is_among(1e3 * sec, refuted_ms)
    ]
    faster = set(sorted(range(len(good)), key=lambda n: _seconds_of(good[n]))[: rank - 1])
    good = [line for n, line in enumerate(good) if n not in faster]
    (copy / RECORD_FILE).write_text("".join(f"{line}\n" for line in good))
    return len(good)


def _seconds_of(line: str) -> float:
    seconds = json.loads(line)[1][1]
    return float(sum(seconds) / len(seconds)) if seconds else _FAILED_SEC


def _database(entry: Mapping[str, Any], scratch: Path) -> Any:
    if entry["folder"] is None:
        return None
    folder, n_records = Path(entry["folder"]), entry["n_trials"]
    final = folder / FINAL_DIR
    # Stock has no play-off: its winner is its fastest record.
    if n_records is None and entry["rank"] == 1 and final.is_dir():
        return json_database(final)
    if cut_database(folder, scratch, n_records, entry["rank"], entry["refuted_ms"]) == 0:
        return None
    return json_database(scratch)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
