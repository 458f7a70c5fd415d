"""From journals to tables (Markdown), figures (SVG) and one self-contained page (HTML).

python -m benchmarks.compare runs/small --out runs/small/report
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.charts import Figure
from benchmarks.entries import baseline_of
from benchmarks.figures.best_by_seconds import best_by_seconds
from benchmarks.figures.time_breakdown import time_breakdown
from benchmarks.journals import Bench, load_bench
from benchmarks.page import make_page
from benchmarks.results import TOLERANCE
from benchmarks.svg import save_svg
from benchmarks.tables import (
    comparison_table,
    latency_table,
    loss_list,
    machine_lines,
    method_table,
    time_table,
    vendor_table,
)

Section = tuple[str, str | Figure]

COMPARED = """\
Everything above 1 is better than the baseline, {baseline}, and all of it is timed anew. *q*: the
baseline's final quality, the best of its record and its next two. *Time to q*: the baseline's
seconds until its incumbent is within {tolerance:.0%} of q over the method's; *trials to q*: the
same by trials. *Latency, equal time*: the baseline's latency over the method's when the shorter
of the two runs was done; *equal trials*: after as many trials as the baseline made; both as the
median of ratios within rounds. Medians over seeds, with the range of seeds and of their 95 %
intervals. ">", "<" and ranges are bounds: somebody was never there, or had nothing yet. *Noise*:
how much a library differs from its own copy in the same rounds. *: no constant of ours was
chosen by runs of this operator.""".replace("\n", " ")
FOUND = """\
*Timed anew*: winners of all methods in one interleaved measurement, the median of its
rounds. *As recorded*: what the run itself took its winner for. *Seconds*: until the run had
its winner and had checked it.""".replace("\n", " ")
TIMES = """\
Seconds, medians over seeds. *start*: MetaSchedule sets the tasks up; *build*, *measure*,
*learn*; *propose*: the rest of the search, which is candidates, decisions and files;
*before and after*: preparation, the untuned reference, play-offs, final compilation and
comparison, which stock does not have.""".replace("\n", " ")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="of benchmarks.run or benchmarks.pack")
    parser.add_argument("--out", type=Path, help="default: FOLDER/report")
    parser.add_argument("--baseline", help="default: stock, or the first method")
    parser.add_argument("--old", action="store_true", help="also the estimator of earlier tables")
    options = parser.parse_args(arguments)
    try:
        bench = load_bench(options.folder)
    except FileNotFoundError:
        print(f"{options.folder} holds no benchmark; make one with benchmarks.run", file=sys.stderr)
        return 2
    out = options.out or options.folder / "report"
    out.mkdir(parents=True, exist_ok=True)
    baseline = options.baseline or baseline_of(bench.methods)
    sections = report(bench, baseline, old=options.old)
    (out / "tables.md").write_text(as_markdown(sections))
    (out / "index.html").write_text(make_page("Benchmark", sections))
    for _, content in sections:
        if isinstance(content, Figure):
            save_svg(content, out)
    print(as_markdown(sections))
    return 0


def report(bench: Bench, baseline: str, *, old: bool = False) -> list[Section]:
    """Return the report: what is said first is what readers come for."""
    return [
        ("Best latency against seconds", best_by_seconds(bench)),
        ("Against the baseline", comparison_table(bench, baseline, old=old)),
        ("", COMPARED.format(baseline=baseline, tolerance=TOLERANCE)),
        ("Losses", loss_list(bench, baseline)),
        ("What was found", latency_table(bench)),
        ("", FOUND),
        ("Where the time goes", time_breakdown(bench)),
        ("", time_table(bench)),
        ("", TIMES),
        ("Against the vendor's library", vendor_table(bench)),
        ("Methods", method_table(bench.methods)),
        ("Machine", machine_lines(bench)),
    ]


def as_markdown(sections: Sequence[Section]) -> str:
    """Return the report in Markdown; figures as links to their files."""
    parts = []
    for heading, content in sections:
        if heading:
            parts.append(f"## {heading}")
        is_figure = isinstance(content, Figure)
        parts.append(f"![{content.name}]({content.name}.svg)" if is_figure else str(content))
        if is_figure:
            parts.append(content.caption)
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
