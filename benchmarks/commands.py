"""Call the package's commands as users do, and time the libraries that they leave."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.models import PeerModel
from tvm_adaptive.cli.console import EXIT_BAD_RESULT, EXIT_OK
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE, read_journal
from tvm_adaptive.models.frontend import PEERS, load
from tvm_adaptive.tuning.target import n_threads_of, resolve_target
from tvm_adaptive.tuning.turns import time_in_turns

# What Python runs.
COMMAND_LINE = ("-m", "tvm_adaptive")
# What a command may take beyond its budget.
GRACE_SEC = 600.0


def tune(
    model: PeerModel,
    path: Path,
    work_dir: Path,
    options: argparse.Namespace,
    *,
    extra: Sequence[str] = (),
    program: Sequence[str] = COMMAND_LINE,
) -> None:
    """Tune a model; a run that was cut short is resumed."""
    command = ["tune", str(path), "--work-dir", str(work_dir), "--seed", str(options.seed)]
    command += ["--budget", f"{options.budget:g}s", "--store", "none"]
    readers = [name for name, peer in PEERS.items() if path.suffix in peer.open]
    command += ["--peers", ",".join(readers), *extra]
    for name, shape in model.shapes.items():
        command += ["--input-shape", f"{name}={'x'.join(map(str, shape))}"]
    if (work_dir / JOURNAL_FILE).exists():
        command = ["tune", "--resume", str(work_dir)]
    run(command, options.budget + GRACE_SEC, program)


def run(command: Sequence[str], limit_sec: float, program: Sequence[str] = COMMAND_LINE) -> None:
    """Run a command of the package; outputs that disagree are a result."""
    done = subprocess.run(
        [sys.executable, *program, *command],
        capture_output=True,
        text=True,
        timeout=limit_sec,
        check=False,
    )
    if done.returncode not in (EXIT_OK, EXIT_BAD_RESULT):
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise OSError(f"{command[0]} ended with {done.returncode}: {message}")


def tuned_library(
    model: PeerModel,
    path: Path,
    work_dir: Path,
    settings: argparse.Namespace,
    extra: Sequence[str] = (),
    *,
    program: Sequence[str] = COMMAND_LINE,
) -> Path:
    """Return the library of a run, which is made or finished if it is not yet."""
    found = library_of(work_dir)
    if found is None:
        tune(model, path, work_dir, settings, extra=extra, program=program)
        found = library_of(work_dir)
    if found is None:
        raise OSError(f"{work_dir} has no library; see its journal")
    return found


def library_of(work_dir: Path) -> Path | None:
    """Return the library of a finished run."""
    return next(work_dir.glob("*.so"), None) if has_ended(work_dir) else None


def has_ended(work_dir: Path) -> bool:
    """Say whether a folder holds a run that has come to its own end."""
    journal = work_dir / JOURNAL_FILE
    events = read_journal(journal) if journal.exists() else []
    return bool(events) and events[-1]["event"] == "end" and not events[-1].get("interrupted")


def secs_in_turns(
    libraries: Mapping[str, Path], path: Path, shapes: Mapping[str, Sequence[int]], n_rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of an inference of each library in each round, each in a process."""
    n_threads = n_threads_of(resolve_target("cpu"))
    threaded = {name: (library, n_threads) for name, library in libraries.items()}
    return time_in_turns(threaded, load(str(path), shapes).inputs(0), n_rounds)
