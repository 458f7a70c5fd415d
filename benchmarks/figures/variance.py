"""AdaTune, figure 3: variance and coefficient of variation against the number of runs."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.charts import Chart, Figure, Line

N_RUNS = (1, 2, 3, 5, 10, 20, 50, 100)
# Of the means, to estimate their variance from.
_LEAST_MEANS = 2


def read_runs(path: Path) -> dict[str, list[list[float]]]:
    """Read what ``micro/variance.py`` wrote, or the same compressed, as it is kept here."""
    raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    found: dict[str, Any] = json.loads(raw)
    # Earlier files are the runs alone.
    return dict(found.get("runs", found))


def variance(runs: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Return two panels: the mean variance, and the mean coefficient of variation.

    Parameters
    ----------
    runs : mapping of str to sequence of sequence of float
        Per workload and candidate the milliseconds of single runs, in order.
    """
    squares, relative = [], []
    for workload, candidates in runs.items():
        found = {n: _of_means(candidates, n) for n in N_RUNS}
        x = tuple(float(n) for n, each in found.items() if each is not None)
        values = [each for each in found.values() if each is not None]
        squares.append(Line(workload, x, tuple(each[0] for each in values)))
        relative.append(Line(workload, x, tuple(each[1] for each in values)))
    label = "runs per measurement"
    panels = (
        Chart("variance", label, "ms²", tuple(squares), log_x=True, log_y=True),
        Chart("coefficient of variation", label, "%", tuple(relative), log_x=True, log_y=True),
    )
    caption = (
        "How far means of n runs of the same candidate are apart, means over random "
        "candidates: the variance, and the standard deviation over the mean. AdaTune's figure "
        "3 shows one model's operators on a Xeon E5-2690 v3 and a Tesla P100; here n runs "
        "follow directly on one another, so that slow drift does not average out."
    )
    return Figure("variance", caption, panels)


def _of_means(candidates: Sequence[Sequence[float]], n: int) -> tuple[float, float] | None:
    """Return variance and coefficient of variation (%) of means of n consecutive runs."""
    found = []
    for runs in candidates:
        n_means = len(runs) // n
        if n_means < _LEAST_MEANS:
            continue
        means = np.asarray(runs[: n * n_means]).reshape(n_means, n).mean(axis=1)
        found.append((float(means.var(ddof=1)), float(100 * means.std(ddof=1) / means.mean())))
    if not found:
        return None
    squares, relative = np.mean(found, axis=0)
    return float(squares), float(relative)
