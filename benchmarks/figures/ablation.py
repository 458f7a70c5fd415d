"""AdaTune, figures 10 and 11: one part after the other, by trials and by seconds."""

from __future__ import annotations

from benchmarks.charts import Figure
from benchmarks.figures.common import ablation_charts
from benchmarks.journals import Bench
from benchmarks.methods import LADDER

# Of the ladder: stock's parts, then the three that AdaTune adds.
_RUNGS_OF_THE_PAPER = 4
_CAPTION = (
    "Best latency against {axis}, one part added after the other to stock's. AdaTune's figure "
    "{number} has XGBoost with simulated annealing and a deterministic evaluator, then the "
    "forest, the contextual search and the adaptive evaluator; here the search is "
    "evolutionary, and rungs follow that the paper does not have: {more}. Beside them stock's "
    "own command, and the default, which has smaller and more diverse batches than the last "
    "rung."
)


def ablation_by_trials(bench: Bench) -> Figure:
    """Return figure 10."""
    return _ablation(bench, "ablation-by-trials", "trials", 10)


def ablation_by_seconds(bench: Bench) -> Figure:
    """Return figure 11."""
    return _ablation(bench, "ablation-by-seconds", "seconds", 11)


def _ablation(bench: Bench, name: str, axis: str, number: int) -> Figure:
    # A ladder has more than its two ends.
    panels = ablation_charts(bench, "ladder", by_trials=axis == "trials")
    more = ", ".join(
        what.removeprefix("+ ")
        for rung, what, _ in LADDER[_RUNGS_OF_THE_PAPER:]
        if rung in bench.methods
    )
    return Figure(name, _CAPTION.format(axis=axis, number=number, more=more), panels)
