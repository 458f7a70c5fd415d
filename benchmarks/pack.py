"""Keep what figures are made of, small enough for version control.

    python -m benchmarks.pack runs/small benchmarks/results/small

Journals are compressed, databases and libraries left out; ``compare.py`` reads the
packed folder as it reads the one of the run. A benchmark may be packed to where another
one lies: its runs, other workloads or other seeds, join that one's.
"""

from __future__ import annotations

import argparse
import json
import lzma
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
from benchmarks.plan import OUTCOME_FILE
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
    events = read_events(source / BENCH_JOURNAL)
    outcomes = sorted(source.glob(f"*/*/*/{OUTCOME_FILE}"))
    folders = [path.parent.relative_to(source) for path in outcomes]
    if there := [str(folder) for folder in folders if (target / folder).exists()]:
        raise FileExistsError(
            f"{target} holds {', '.join(there)} already. Pack to another folder, or remove "
            "what is to be replaced."
        )
    packed = target / (BENCH_JOURNAL + PACKED)
    earlier = read_events(target / BENCH_JOURNAL) if packed.exists() else []
    target.mkdir(parents=True, exist_ok=True)
    _compress([*earlier, *events], packed, source)
    for name in (NEUTRAL_JOURNAL, REGRET_JOURNALS):
        for path in sorted(source.glob(f"*/{name}")):
            _add_rounds(path, target / path.relative_to(source), source)
    for folder in folders:
        (target / folder).mkdir(parents=True)
        shutil.copy(source / folder / OUTCOME_FILE, target / folder / OUTCOME_FILE)
        journal = source / folder / JOURNAL_FILE
        if journal.exists():
            copy = target / folder / (JOURNAL_FILE + PACKED)
            _compress(read_events(journal), copy, source)
    return len(folders)


def _add_rounds(path: Path, copy: Path, source: Path) -> None:
    """Compress a journal of rounds; those of another benchmark's runs come before."""
    packed = copy.with_name(copy.name + PACKED)
    earlier = read_events(copy) if packed.exists() else []
    copy.parent.mkdir(parents=True, exist_ok=True)
    _compress([*earlier, *read_events(path)], packed, source)


def _compress(events: Sequence[Event], path: Path, source: Path) -> None:
    # Where the benchmark lay on its machine is of no interest anywhere else.
    root = json.dumps(f"{source.resolve()}/")[1:-1]
    with lzma.open(path, "wt") as file:
        for event in events:
            file.write(json.dumps(event, separators=(",", ":")).replace(root, "") + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="keep a benchmark's journals, compressed")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    print(f"{pack(options.source, options.target)} runs", file=sys.stderr)
