"""Comparisons as tables in Markdown. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.journals import FINAL, Bench, Run, median_of
from benchmarks.methods import METHODS
from benchmarks.results import FIGURES, Comparison, comparisons, losses, overall
from benchmarks.stats import Interval, Spread, geometric_mean, paired
from benchmarks.workloads import WORKLOADS

NOTHING = "-"
_SEARCH_STAGES = ("start", "build", "measure", "learn", "propose")
Row = Sequence[str]


def markdown(head: Row, rows: Iterable[Row]) -> str:
    """Return a table; cells must hold no bars."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def bounds(value: Interval) -> str:
    """Return a value as text; one that is not known with its sign, or as a range."""
    if value.is_exact:
        return f"{value.low:.2f}"
    if not math.isfinite(value.high):
        return f"> {value.low:.2f}" if value.low > 0 else "unknown"
    return f"{value.low:.2f} to {value.high:.2f}" if value.low > 0 else f"< {value.high:.2f}"


def cell(value: Spread | None, *, is_noise: bool = False) -> str:
    """Return a spread as text: median, range, how many are bounds, and whether it is noise."""
    if value is None:
        return NOTHING
    text = bounds(value.median)
    if value.low < value.high:
        text += f" ({bounds(Interval(value.low, value.high))})" if _is_open(value) else _span(value)
    if value.n_bounds:
        text += f", {value.n_bounds} of {value.n} bounds"
    return f"{text}, within the noise" if is_noise else text


def comparison_table(bench: Bench, baseline: str, *, old: bool = False) -> str:
    """Return all methods against the baseline, per workload and over all of them.

    Parameters
    ----------
    bench : Bench
    baseline : str
        A method.
    old : bool, default False
        Whether a column says how the estimator of earlier tables reads the same journals.
    """
    found = comparisons(bench, baseline)
    head = ["workload", "method", "seeds", *(_title(name) for name in FIGURES)]
    head += ["noise", "timed anew", *(["time to q by scaled curves"] if old else [])]
    rows = [_comparison_row(each, old) for each in found]
    for method in dict.fromkeys(each.method for each in found):
        total = overall(found, method)
        scaled = [each.scaled for each in found if each.method == method and each.scaled]
        means = [bounds(total[name][0]) if name in total else NOTHING for name in FIGURES]
        worst = [
            f"{bounds(total[name][1])} ({total[name][2]})" if name in total else NOTHING
            for name in FIGURES
        ]
        ends = [f"{geometric_mean(scaled):.2f}"] if old and scaled else [""] * old
        rows.append(["**geometric mean**", method, "", *means, "", "", *ends])
        ends = [f"{min(scaled):.2f}"] if old and scaled else [""] * old
        rows.append(["**worst**", method, "", *worst, "", "", *ends])
    return markdown(head, rows) if rows else "No method shares a seed with the baseline."


def loss_list(bench: Bench, baseline: str) -> str:
    """Return where a method was worse than the baseline, or never got there, one per line."""
    found = losses(comparisons(bench, baseline))
    lines = [
        f"- {method} on {workload}, {_title(name)}: {bounds(value.median)}{_never(value)}"
        for method, workload, name, value in sorted(found, key=lambda each: each[3].median.high)
    ]
    failed = [
        f"- {run.spec.workload}, {run.key}: {run.failure or nothing_found(run)}"
        for run in bench.runs
        if run.failure or not math.isfinite(run.curve.final_ms)
    ]
    failed += [
        f"- {run.spec.workload}, {run.key}: its winner could not be timed anew: {error}"
        for run in bench.runs
        if (error := bench.error_of(run))
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
        rounds = {name: [entries[name]] for name in ("untuned", "pytorch") if name in entries}
        samples = {name: list(those[0].values()) for name, those in rounds.items()}
        for method in bench.methods:
            rounds[method] = [entries[key] for key in entries if _is_final_of(key, method)]
            samples[method] = [median_of(each.values()) for each in rounds[method]]
        for name, those in samples.items():
            if those:
                span = f"{number(min(those))} to {number(max(those))}"
                pairs = (paired(entries.get("pytorch", {}), each) for each in rounds[name])
                ratios = [pair.value for pair in pairs if pair is not None]
                against = f"{median_of(ratios):.2f}" if ratios else NOTHING
                rows.append([workload, name, number(median_of(those)), span, against])
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
        tuner = (
            "MetaSchedule's tune_tasks" if method.tuner == "stock" else f"preset {method.preset}"
        )
        rows.append([name, method.what, f"{tuner}{': ' if changes else ''}{changes}"])
    return markdown(["method", "", "options"], rows)


def machine_lines(bench: Bench) -> str:
    """Return the machines, their noise, and a warning where that is too much."""
    lines = [line for machine in bench.machines for line in _lines_of(machine)]
    for when, noise in bench.noise.items():
        if "error" in noise:
            lines.append(f"- noise {when}: could not be measured ({noise['error']})")
            continue
        lines.append(
            f"- noise {when}: eight of ten timings of a fixed kernel within "
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


def _comparison_row(each: Comparison, old: bool) -> list[str]:
    cells = [cell(each.figures[name], is_noise=each.is_noise(name)) for name in FIGURES]
    held_out = each.workload in WORKLOADS and WORKLOADS[each.workload].is_held_out
    noise = f"{each.noise:.1%}" if math.isfinite(each.noise) else NOTHING
    row = [f"{each.workload}{' *' if held_out else ''}", each.method, str(each.n_pairs), *cells]
    row += [noise, f"{each.timed[0]} of {each.timed[1]}"]
    return row + ([NOTHING if each.scaled is None else f"{each.scaled:.2f}"] if old else [])


def _title(name: str) -> str:
    return f"latency, {name}" if name.startswith("equal") else name


def _never(value: Spread) -> str:
    return f", {value.n_never} of {value.n} never there" if value.n_never else ""


def _is_open(value: Spread) -> bool:
    return value.low <= 0 or not math.isfinite(value.high)


def _span(value: Spread) -> str:
    return f" ({value.low:.2f} to {value.high:.2f})"


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
