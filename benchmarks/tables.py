"""Comparisons as tables in Markdown. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.journals import FINAL, Bench, Run, median_of
from benchmarks.methods import METHODS
from benchmarks.results import Comparison, columns_of, comparisons, losses, overall
from benchmarks.stats import Spread

NOTHING = "-"
_SEARCH_STAGES = ("start", "build", "measure", "learn", "propose")
# What an estimate that is not known exactly stands with.
_BELOW, _ABOVE = "<", ">"

Row = Sequence[str]


def markdown(head: Row, rows: Iterable[Row]) -> str:
    """Return a table; cells must hold no bars."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def cell(value: Spread | None, bound: str = _BELOW) -> str:
    """Return a spread as text: median, range, and how many were censored.

    Parameters
    ----------
    value : Spread or None
    bound : str
        What a censored median is put behind.
    """
    if value is None:
        return NOTHING
    text = f"{value.median.value:.2f}"
    if value.median.censored:
        text = f"{bound} {text}"
    if value.n > 1:
        text += f" ({value.low:.2f} to {value.high:.2f})"
    if value.n_censored:
        word = "never" if bound == _BELOW else "had nothing to compare with yet"
        text += f", {value.n_censored} of {value.n} {word}"
    return text


def comparison_table(bench: Bench, baseline: str) -> str:
    """Return all methods against the baseline, per workload and over all of them."""
    found = comparisons(bench, baseline)
    names = list(columns_of(found[0])) if found else []
    head = ["workload", "method", "seeds", *(_title(name) for name in names)]
    rows = [_comparison_row(each, names) for each in found]
    for method in dict.fromkeys(each.method for each in found):
        total = overall(found, method)
        for label, pick in (("geometric mean", 0), ("worst", 1)):
            cells = [_total_cell(total.get(name), pick) for name in names]
            rows.append([f"**{label}**", method, "", *cells])
    return markdown(head, rows) if rows else "No method shares a seed with the baseline."


def loss_list(bench: Bench, baseline: str) -> str:
    """Return where a method was worse than the baseline, one per line."""
    found = losses(comparisons(bench, baseline))
    lines = [
        f"- {method} on {workload}, {_title(name)}: {value:.2f}"
        for method, workload, name, value in sorted(found, key=lambda each: each[3])
    ]
    failed = [
        f"- {run.spec.workload}, {run.key}: {run.failure or nothing_found(run)}"
        for run in bench.runs
        if run.failure or not math.isfinite(run.curve.final_ms)
    ]
    return "\n".join(lines + failed) or "None."


def nothing_found(run: Run) -> str:
    """Return what is said of a run without a success."""
    return f"found nothing; {run.n_errors} of {run.n_trials} trials failed"


def latency_table(bench: Bench) -> str:
    """Return what was found, after how long: timed anew and as recorded."""
    head = ["workload", "method", "seeds", "ms, timed anew", "range", "ms, as recorded"]
    head += ["seconds", "trials", "failed", "tuner, MB"]
    rows = []
    for workload, method, runs in _groups(bench):
        anew = [ms for run in runs if math.isfinite(ms := bench.neutral_ms(run))]
        span = f"{number(min(anew))} to {number(max(anew))}" if anew else NOTHING
        rows.append(
            [
                workload,
                method,
                str(len(runs)),
                number(median_of(anew)),
                span,
                number(median_of(run.curve.final_ms for run in runs)),
                f"{median_of(run.finish_sec for run in runs):.0f}",
                f"{median_of(run.n_trials for run in runs):.0f}",
                f"{median_of(run.n_errors for run in runs):.0f}",
                f"{median_of(run.peak_mb for run in runs):.0f}",
            ]
        )
    return markdown(head, rows)


def time_table(bench: Bench) -> str:
    """Return where the seconds went: medians over seeds."""
    head = ["workload", "method", *_SEARCH_STAGES, "before and after", "sum", "per trial"]
    rows = []
    for workload, method, runs in _groups(bench):
        seconds = [stage_medians(runs, stage) for stage in _SEARCH_STAGES]
        outside = [
            sum(sec for name, sec in run.stages.items() if name not in _SEARCH_STAGES)
            for run in runs
        ]
        total = [sum(run.stages.values()) for run in runs]
        per_trial = [t / run.n_trials for t, run in zip(total, runs, strict=True) if run.n_trials]
        cells = [*seconds, median_of(outside), median_of(total)]
        rows.append(
            [workload, method, *(f"{sec:.1f}" for sec in cells), f"{median_of(per_trial):.2f}"]
        )
    return markdown(head, rows)


def vendor_table(bench: Bench) -> str:
    """Return networks untuned, tuned and in PyTorch, timed in the same rounds."""
    rows = []
    for workload, entries in bench.neutral.items():
        if "untuned" not in entries and "pytorch" not in entries:
            continue
        torch_ms = median_of(entries.get("pytorch"))
        named = {"untuned": entries.get("untuned", []), "pytorch": entries.get("pytorch", [])}
        for method in bench.methods:
            keys = [key for key in entries if _is_final_of(key, method)]
            named[method] = [median_of(entries[key]) for key in keys]
        for name, samples in named.items():
            if samples:
                middle = median_of(samples)
                span = f"{number(min(samples))} to {number(max(samples))}"
                against = f"{torch_ms / middle:.2f}" if math.isfinite(torch_ms) else NOTHING
                rows.append([workload, name, number(middle), span, against])
    head = ["network", "", "ms", "range", "x faster than PyTorch"]
    return markdown(head, rows) if rows else "No network was timed anew."


def method_table(names: Iterable[str]) -> str:
    """Return what the methods are."""
    rows = []
    for name in names:
        method = METHODS.get(name)
        if method is None:
            rows.append([name, "no longer in the table of methods", ""])
            continue
        changes = ", ".join(f"{key} {value}" for key, value in method.changes.items())
        door = "MetaSchedule's tune_tasks" if method.door == "stock" else f"preset {method.preset}"
        rows.append([name, method.what, f"{door}{': ' if changes else ''}{changes}"])
    return markdown(["method", "", "options"], rows)


def machine_lines(bench: Bench) -> str:
    """Return the machines, their noise, and a warning where that is too much."""
    lines = [line for machine in bench.machines for line in _lines_of(machine)]
    for when, noise in bench.noise.items():
        if "error" in noise:
            lines.append(f"- noise {when}: could not be measured ({noise['error']})")
            continue
        lines.append(
            f"- noise {when}: nine of ten timings of a fixed kernel within "
            f"{noise['spread']:.1%}, drift {noise['drift']:+.1%}"
        )
        if noise["noisy"]:
            lines.append(
                "- **This machine was too noisy**: differences below that spread mean nothing."
            )
    return "\n".join(lines)


def _lines_of(machine: dict[str, Any]) -> list[str]:
    packages = ", ".join(f"{k} {v}" for k, v in machine.get("packages", {}).items())
    virtual = ", virtual" if machine.get("virtual") else ""
    seeds = ", ".join(str(seed) for seed in sorted(machine["seeds"]))
    return [
        (
            f"- {machine.get('cpu')}{virtual}, {machine.get('n_processors')} processors, "
            f"{machine.get('memory_gb')} GB, governor {machine.get('governor')}, "
            f"load {machine.get('load_1min', math.nan):.1f} at the start"
            f"{'; seeds ' + seeds if seeds else ''}"
        ),
        (
            f"- {machine.get('platform')}, Python {machine.get('python')}, {packages}, "
            f"commit {machine.get('commit')}"
        ),
        f"- size {machine.get('size')}, target {machine.get('target')}",
    ]


def stage_medians(runs: Sequence[Run], stage: str) -> float:
    """Return the median seconds of a stage."""
    return median_of(run.stages.get(stage, 0.0) for run in runs)


def number(value: float) -> str:
    """Return three or four significant digits."""
    if not math.isfinite(value):
        return NOTHING
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}" if value < 100 else f"{value:.1f}"


def _comparison_row(each: Comparison, names: Sequence[str]) -> list[str]:
    values = columns_of(each)
    cells = [cell(values[name], _ABOVE if name.startswith("equal") else _BELOW) for name in names]
    return [each.workload, each.method, str(each.n_pairs), *cells]


def _total_cell(total: tuple[float, float, str] | None, pick: int) -> str:
    if total is None:
        return NOTHING
    return f"{total[0]:.2f}" if pick == 0 else f"{total[1]:.2f} ({total[2]})"


def _title(name: str) -> str:
    return f"latency, {name}" if name.startswith("equal") else f"time to {name}"


def _groups(bench: Bench) -> list[tuple[str, str, list[Run]]]:
    return [
        (workload, method, runs)
        for workload in bench.workloads
        for method in bench.methods
        if (runs := bench.of(workload, method))
    ]


def _is_final_of(key: str, method: str) -> bool:
    parts = key.split("/")
    return len(parts) == 3 and parts[0] == method and parts[2] == FINAL
