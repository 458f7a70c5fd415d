"""FamilySeer's two ideas, each alone, both, and neither, by trials."""

from __future__ import annotations

from benchmarks.charts import Figure
from benchmarks.figures.common import ablation_charts
from benchmarks.journals import Bench

_CAPTION = (
    "Best latency against trials: one model or a model per family, with and without foresee "
    "slots, no task knowing the schedules of its relatives; and ours, in which it does. "
    "FamilySeer's RFC has no such figure: it shows both ideas together, against Ansor."
)


def families_by_trials(bench: Bench) -> Figure:
    """Return the ablation that the RFC was asked for."""
    # Without one of the two ideas alone, nothing can be distinguished.
    panels = ablation_charts(bench, "families", by_trials=True)
    return Figure("families-by-trials", _CAPTION, panels)
