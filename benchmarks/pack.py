"""Keep what figures are made of, small enough for version control.

    python -m benchmarks.pack runs/small benchmarks/results/small

Journals are compressed, databases and libraries left out; ``compare.py`` reads the
packed folder as it reads the one of the run. A benchmark may be packed to where another
one lies: its runs, other workloads or other seeds, join that one's. A call that was killed
is repeated.
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
    if there := [str(each) for each in folders if (target / each / OUTCOME_FILE).exists()]:
        raise FileExistsError(
            f"{target} holds {', '.join(there)} already. Pack to another folder, or remove "
            "what is to be replaced."
        )
    _append(events, target / (BENCH_JOURNAL + PACKED), source)
    for name in (NEUTRAL_JOURNAL, REGRET_JOURNALS):
        for path in sorted(source.glob(f"*/{name}")):
            copy = target / path.relative_to(source)
            _append(read_events(path), copy.with_name(copy.name + PACKED), source)
    for folder in folders:
        journal = source / folder / JOURNAL_FILE
        if journal.exists():
            _append(read_events(journal), target / folder / (JOURNAL_FILE + PACKED), source)
        (target / folder).mkdir(parents=True, exist_ok=True)
        # Last: a run without it is packed again.
        shutil.copy(source / folder / OUTCOME_FILE, target / folder / OUTCOME_FILE)
    return len(folders)


def _append(events: Sequence[Event], packed: Path, source: Path) -> None:
    """Compress events behind those of other benchmarks: all or nothing, and not twice."""
    # Where the benchmark lay on its machine is of no interest anywhere else.
    root = json.dumps(f"{source.resolve()}/")[1:-1]
    lines = [_line(event).replace(root, "") for event in events]
    earlier = (
        [_line(each) for each in read_events(packed.with_suffix(""))] if packed.exists() else []
    )
    if lines and earlier[-len(lines) :] == lines:  # an earlier call was killed after it
        return
    packed.parent.mkdir(parents=True, exist_ok=True)
    temporary = packed.with_name(packed.name + ".tmp")
    with lzma.open(temporary, "wt") as file:
        file.writelines(f"{line}\n" for line in [*earlier, *lines])
    os.replace(temporary, packed)


def _line(event: Event) -> str:
    return json.dumps(event, separators=(",", ":"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="keep a benchmark's journals, compressed")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    print(f"{pack(options.source, options.target)} runs", file=sys.stderr)
