"""Keep what figures are made of, small enough for version control.

    python -m benchmarks.pack runs/small benchmarks/results/small

Journals are compressed, databases and libraries left out; ``compare.py`` reads the
packed folder as it reads the one of the run.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import sys
from pathlib import Path

from benchmarks.journals import BENCH_JOURNAL, JOURNAL_FILE, NEUTRAL_FILE, PACKED, read_events
from benchmarks.plan import OUTCOME_FILE


def pack(source: Path, target: Path) -> int:
    """Pack a benchmark's folder; returns the number of its runs.

    Raises
    ------
    FileNotFoundError
        When ``source`` is none.
    FileExistsError
        When ``target`` is there already.
    """
    read_events(source / BENCH_JOURNAL)
    target.mkdir(parents=True)
    _compress(source / BENCH_JOURNAL, target, source)
    for path in sorted(source.glob(f"*/{NEUTRAL_FILE}")):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    outcomes = sorted(source.glob(f"*/*/*/{OUTCOME_FILE}"))
    for path in outcomes:
        folder = target / path.parent.relative_to(source)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / OUTCOME_FILE)
        if (path.parent / JOURNAL_FILE).exists():
            _compress(path.parent / JOURNAL_FILE, folder, source)
    return len(outcomes)


def _compress(journal: Path, folder: Path, source: Path) -> None:
    # Where the benchmark lay on its machine is of no interest anywhere else.
    root = json.dumps(f"{source.resolve()}/")[1:-1]
    with lzma.open(folder / (journal.name + PACKED), "wt") as file:
        for event in read_events(journal):
            file.write(json.dumps(event, separators=(",", ":")).replace(root, "") + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="keep a benchmark's journals, compressed")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    print(f"{pack(options.source, options.target)} runs", file=sys.stderr)
