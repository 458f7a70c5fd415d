"""Tell how calibrated the forecasts of the forest were in runs, by the journals of these runs.

    python -m benchmarks.micro.calibration runs/operators benchmarks/results/operators

Each batch was forecast before it was measured. For each folder and workload: batches, their
median rank correlation, the root mean square of (measured - mean) / std over all candidates, and
the share of measured values within the 90 % intervals (journals of earlier versions lack it). The
first forecast of each task is apart: it follows from a handful of candidates.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.journals import read_events
from benchmarks.tables import markdown
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE

Event = dict[str, Any]

HEAD = (
    *("workload", "method", "batches", "rank correlation, median"),
    *("z rms, first batch", "z rms, later", "within 90 %, later"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="of benchmarks")
    options = parser.parse_args(arguments)
    rows = [
        [workload, method, *cells_of(events)]
        for folder in options.folders
        for (workload, method), events in sorted(forecasts_of(folder).items())
    ]
    print(markdown(HEAD, rows))
    return 0


def forecasts_of(folder: Path) -> dict[tuple[str, str], list[Event]]:
    """Return the forecasts of all runs of a benchmark, by workload and method.

    Each has the further field ``is_first``: whether its task had no forecast before.
    """
    found: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for path in _journals(folder):
        workload, method, _ = path.parent.relative_to(folder).parts[:3]
        tasks: set[str] = set()
        for event in read_events(path):
            if event["event"] == "forecast":
                found[workload, method].append(event | {"is_first": event["task"] not in tasks})
                tasks.add(event["task"])
    return dict(found)


def cells_of(events: Sequence[Event]) -> list[str]:
    """Return the cells of a row: batches, rank correlation, both z rms, coverage."""
    correlations = [e["spearman"] for e in events if _is_number(e["spearman"])]
    cells = [str(len(events)), f"{statistics.median(correlations):.2f}" if correlations else ""]
    for is_first in (True, False):
        squares = _mean([e for e in events if e["is_first"] == is_first], "z_rms", power=2)
        cells.append("" if squares is None else f"{math.sqrt(squares):.2f}")
    coverage = _mean([e for e in events if not e["is_first"]], "coverage")
    cells.append("" if coverage is None else f"{coverage:.0%}")
    return cells


def _journals(folder: Path) -> Iterator[Path]:
    """Yield the journals of all runs, without the suffix of packed ones."""
    # workload/method/seed, as `benchmarks.run` and `benchmarks.pack` leave them.
    for path in sorted(folder.glob(f"*/*/*/{JOURNAL_FILE}*")):
        yield path.with_name(JOURNAL_FILE)


def _mean(events: Sequence[Event], name: str, power: int = 1) -> float | None:
    """Return the mean of a power over candidates; None where no event has the field."""
    known = [e for e in events if _is_number(e.get(name))]
    total = sum(e["n"] for e in known)
    return sum(e[name] ** power * e["n"] for e in known) / total if total else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


if __name__ == "__main__":
    sys.exit(main())
