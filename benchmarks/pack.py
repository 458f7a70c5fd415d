"""Keep what figures are made of, small enough for version control.

    python -m benchmarks.pack runs/small benchmarks/results/small

Journals are compressed, databases and libraries left out; ``compare.py`` reads the
packed folder as it reads the one of the run. A benchmark may be packed to where another
one lies: its runs, other workloads or other seeds, join that one's. After a kill, repeat the
command.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.journals import (
    BENCH_JOURNAL,
    NEUTRAL_JOURNAL,
    PACKED,
    REGRET_JOURNALS,
    Event,
    read_events,
)
from benchmarks.plan import OUTCOME_FILE, read_outcome
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE


def pack(source: Path, target: Path) -> int:
    """Pack a benchmark's folder; returns the number of its runs.

    Raises
    ------
    FileNotFoundError
        When ``source`` is none.
    FileExistsError
        When ``target`` holds one of the runs already; nothing is written then.
    """
    outcomes = sorted(source.glob(f"*/*/*/{OUTCOME_FILE}"))
    folders = [path.parent.relative_to(source) for path in outcomes]
    if there := [str(each) for each in folders if read_outcome(target / each) is not None]:
        raise FileExistsError(
            f"{target} holds {', '.join(there)} already. Pack to another folder, or remove "
            "what is to be replaced."
        )
    # Where the benchmark lay on its machine is of no interest anywhere else.
    root = json.dumps(f"{source.resolve()}/")[1:-1]

    def lines_of(path: Path) -> list[str]:
        return [_line(event).replace(root, "") for event in read_events(path)]

    _join(lines_of(source / BENCH_JOURNAL), target / BENCH_JOURNAL)
    for name in (NEUTRAL_JOURNAL, REGRET_JOURNALS):
        for path in sorted(source.glob(f"*/{name}")):
            _join(lines_of(path), target / path.relative_to(source))
    for folder in folders:
        if (source / folder / JOURNAL_FILE).exists():
            _write(lines_of(source / folder / JOURNAL_FILE), target / folder / JOURNAL_FILE)
        (target / folder).mkdir(parents=True, exist_ok=True)
        # Last: a run without it is packed again.
        shutil.copy(source / folder / OUTCOME_FILE, target / folder / OUTCOME_FILE)
    return len(folders)


def _join(lines: list[str], path: Path) -> None:
    """Pack lines behind those of other benchmarks; what a killed call has written stays once."""
    packed = path.with_name(path.name + PACKED)
    earlier = [_line(each) for each in read_events(path)] if packed.exists() else []
    starts = range(len(earlier) - len(lines) + 1)
    if any(earlier[start : start + len(lines)] == lines for start in starts):
        return
    # The journal may have been packed before it had all its lines; its first is its own.
    counts = range(min(len(earlier), len(lines)), 0, -1)
    n_known = next((n for n in counts if earlier[-n:] == lines[:n]), 0)
    _write([*earlier, *lines[n_known:]], path)


def _write(lines: Sequence[str], path: Path) -> None:
    """Pack the lines of a journal: all of them, or none."""
    packed = path.with_name(path.name + PACKED)
    packed.parent.mkdir(parents=True, exist_ok=True)
    temporary = packed.with_name(packed.name + ".tmp")
    with lzma.open(temporary, "wt") as file:
        file.writelines(f"{line}\n" for line in lines)
    os.replace(temporary, packed)


def _line(event: Event) -> str:
    return json.dumps(event, separators=(",", ":"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="keep a benchmark's journals, compressed")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    print(f"{pack(options.source, options.target)} runs", file=sys.stderr)
