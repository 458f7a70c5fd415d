"""Make figures: one command each.

python -m benchmarks.figures adatune-6 --bench runs/small --out runs/figures
python -m benchmarks.figures all --bench runs/small --recordings benchmarks/data/*.npz \
        --runs runs/variance.json --out runs/figures
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.charts import Figure
from benchmarks.figures.table import BENCH, FIGURES, RECORDINGS, RUNS
from benchmarks.figures.variance import read_runs
from benchmarks.journals import load_bench
from benchmarks.page import make_page
from benchmarks.scheduler.recordings import load_recording
from benchmarks.svg import save_svg


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figures", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("names", nargs="+", choices=[*FIGURES, "all"], metavar="NAME")
    parser.add_argument("--bench", type=Path, help="folder of benchmarks.run or benchmarks.pack")
    parser.add_argument("--recordings", type=Path, nargs="+", help="of benchmarks/data")
    parser.add_argument("--runs", type=Path, help="of benchmarks.micro.variance")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    names = list(FIGURES) if "all" in options.names else options.names
    sources = load_sources(options)
    options.out.mkdir(parents=True, exist_ok=True)
    n_missing = 0
    for name in names:
        entry = FIGURES[name]
        if entry.source not in sources:
            print(f"{name}: left out, needs --{entry.source}", file=sys.stderr)
            n_missing += 1
            continue
        figure = entry.make(sources[entry.source])
        if not figure.panels:
            print(f"{name}: the {entry.source} given hold nothing for it", file=sys.stderr)
            n_missing += 1
            continue
        save(figure, entry.papers, options.out)
        print(f"{name}: {options.out / figure.name}.html")
    return 0 if n_missing < len(names) else 2


def load_sources(options: argparse.Namespace) -> dict[str, Any]:
    """Read what was given, once."""
    readers: dict[str, Callable[[Any], Any]] = {
        BENCH: load_bench,
        RECORDINGS: lambda paths: [load_recording(path) for path in paths],
        RUNS: read_runs,
    }
    given = {name: getattr(options, name) for name in readers}
    return {name: readers[name](value) for name, value in given.items() if value is not None}


def save(figure: Figure, papers: str, folder: Path) -> None:
    """Write a figure as a page with what must be said of it, and as SVG."""
    page = make_page(papers, [("", figure)])
    (folder / f"{figure.name}.html").write_text(page)
    save_svg(figure, folder)


if __name__ == "__main__":
    sys.exit(main())
