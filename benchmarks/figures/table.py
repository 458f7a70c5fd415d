"""All figures: whose they are, and what they are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.charts import Figure
from benchmarks.figures.ablation import ablation_by_seconds, ablation_by_trials
from benchmarks.figures.best_by_seconds import best_by_seconds
from benchmarks.figures.epsilons import epsilons
from benchmarks.figures.families import families_by_trials
from benchmarks.figures.gain_cost import gain_cost
from benchmarks.figures.networks import network_latency, network_time
from benchmarks.figures.schedulers import SCHEDULER_FIGURES, figure_of
from benchmarks.figures.time_breakdown import time_breakdown
from benchmarks.figures.tuning_curves import chain_traces, curve_fits, tuning_curves
from benchmarks.figures.variance import variance

BENCH = "bench"
RECORDINGS = "recordings"
RUNS = "runs"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A figure that can be made.

    Attributes
    ----------
    papers : str
        The figures that it stands for.
    source : {"bench", "recordings", "runs"}
        What ``make`` takes: a benchmark's folder, recorded tunings, single runs.
    make : callable
    """

    papers: str
    source: str
    make: Callable[[Any], Figure]


_ORACLE, _STATIC, _DYNAMIC, _SELECTION, _ANSOR = (figure_of(each) for each in SCHEDULER_FIGURES)
# To add a figure, write its function in a file of its own and name it here.
FIGURES: dict[str, Recipe] = {
    "adatune-2": Recipe("AdaTune 2, 9; DynaTune 12", BENCH, time_breakdown),
    "adatune-3": Recipe("AdaTune 3", RUNS, variance),
    "adatune-4": Recipe("AdaTune 4", BENCH, epsilons),
    "adatune-6": Recipe("AdaTune 6", BENCH, best_by_seconds),
    "adatune-7": Recipe("AdaTune 7; DynaTune 11", BENCH, network_latency),
    "adatune-8": Recipe("AdaTune 8", BENCH, network_time),
    "adatune-10": Recipe("AdaTune 10", BENCH, ablation_by_trials),
    "adatune-11": Recipe("AdaTune 11", BENCH, ablation_by_seconds),
    "dynatune-2": Recipe("DynaTune 2", RECORDINGS, gain_cost),
    "dynatune-4": Recipe("DynaTune 4", RECORDINGS, tuning_curves),
    "dynatune-7": Recipe("DynaTune 7", RECORDINGS, _ORACLE),
    "dynatune-8": Recipe("DynaTune 8", RECORDINGS, _STATIC),
    "dynatune-9": Recipe("DynaTune 9", RECORDINGS, _DYNAMIC),
    "dynatune-13": Recipe("DynaTune 13", RECORDINGS, curve_fits),
    "dynatune-14": Recipe("DynaTune 14 to 18", RECORDINGS, _SELECTION),
    "dynatune-19": Recipe("DynaTune 19", RECORDINGS, chain_traces),
    "dynatune-20": Recipe("DynaTune 20, 21", RECORDINGS, _ANSOR),
    "familyseer": Recipe("FamilySeer, as asked for", BENCH, families_by_trials),
}
