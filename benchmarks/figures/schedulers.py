"""DynaTune, figures 7 to 9, 14 to 18, 20 and 21: schedulers on the same recordings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.charts import Chart, Figure, Line
from benchmarks.scheduler.metrics import latency_at
from benchmarks.scheduler.replay import CURVE_POINTS, HORIZON, POLICIES
from tvm_adaptive.task_scheduler.arms import Arm, Decision, Policy
from tvm_adaptive.testing.recording import Recording
from tvm_adaptive.testing.replay import replay
from tvm_adaptive.values.trial import FloatArray

# As the paper: five runs, the median.
N_SEEDS = 5
# Latencies of more than so many times the final one are not drawn: untuned operators are a
# hundred times slower, and nothing could be seen below them.
_TOP = 3.0
SEQUENTIAL = "one after the other"


class Sequential:
    """AutoTVM's order: an operator gets all its trials before the next one begins."""

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        """Return the first arm that is not finished."""
        del rng
        live = [index for index, arm in enumerate(arms) if not arm.finished]
        return Decision(live[0] if live else None, "in-order" if live else "nothing-left")


@dataclasses.dataclass(frozen=True)
class SchedulerFigure:
    """One of the paper's figures: which policies, and what to say of it."""

    name: str
    policies: tuple[str, ...]
    caption: str


_HOW = (
    " Every seed thin, the median thick, from three times the final latency on; all policies "
    "see the same recorded trials of this machine. The paper tuned with AutoTVM on a Xeon "
    "E5-2690 v3 and a Tesla P100, {more}."
)
SCHEDULER_FIGURES: tuple[SchedulerFigure, ...] = (
    SchedulerFigure(
        "schedulers-oracle",
        ("default", SEQUENTIAL, "oracle"),
        "DynaTune's figure 7: latency against seconds of tuning, with the operators one after "
        "the other as AutoTVM has them, and with an oracle that knows the recording."
        + _HOW.format(more="and its oracle knew each operator's best schedule only"),
    ),
    SchedulerFigure(
        "schedulers-static",
        ("default", "random, static", "round-robin, static", "linear, static"),
        "DynaTune's figure 8: against static allocations."
        + _HOW.format(more="every operator with 1000 trials or so"),
    ),
    SchedulerFigure(
        "schedulers-dynamic",
        ("default", "random, patience", "round-robin, patience"),
        "DynaTune's figure 9: against allocations that end an operator without gain in 200 "
        "trials and give its time to others." + _HOW.format(more="with slots of seconds"),
    ),
    SchedulerFigure(
        "schedulers-selection",
        ("default", "epsilon-greedy", "softmax"),
        "DynaTune's figures 14 to 18: the same belief, another way to choose by it."
        + _HOW.format(more="with a belief from Markov chains; here it is from quadrature"),
    ),
    SchedulerFigure(
        "schedulers-ansor",
        ("default", "gradient", SEQUENTIAL),
        "DynaTune's figures 20 and 21: against Ansor's gradient scheduler, which is stock "
        "MetaSchedule's, too."
        + _HOW.format(more="and took Ansor's terms for similar operators along"),
    ),
)


def schedulers(recordings: Sequence[Recording], comparison: SchedulerFigure) -> Figure:
    """Return one panel per network."""
    networks: dict[str, list[Recording]] = {}
    for recording in recordings:
        networks.setdefault(recording.network, []).append(recording)
    panels = tuple(
        _panel(network, group, comparison.policies) for network, group in networks.items()
    )
    return Figure(comparison.name, comparison.caption, panels)


def figure_of(comparison: SchedulerFigure) -> Callable[[Sequence[Recording]], Figure]:
    """Return the function that makes one comparison's figure."""
    return lambda recordings: schedulers(recordings, comparison)


def _panel(network: str, recordings: Sequence[Recording], names: Sequence[str]) -> Chart:
    batch = recordings[0].batch
    horizon_sec = HORIZON * max(recording.total_sec for recording in recordings)
    times = np.linspace(0.0, horizon_sec, CURVE_POINTS)
    drawn: dict[str, list[FloatArray]] = {name: [] for name in names}
    for name, curves in drawn.items():
        for seed in range(N_SEEDS):
            run = replay(recordings, _policy(name, recordings, seed, batch), seed, batch=batch)
            curves.append(np.array([latency_at(run, float(time)) for time in times]))
    top_ms = _TOP * min(float(curve[-1]) for curves in drawn.values() for curve in curves)
    lines: list[Line] = []
    for name, curves in drawn.items():
        lines += [_line(name, times, curve, top_ms, thick=False) for curve in curves]
        lines.append(_line(name, times, np.median(curves, axis=0), top_ms))
    return Chart(network, "seconds of tuning", "latency, ms", tuple(lines))


def _line(
    name: str, times: FloatArray, curve: FloatArray, top_ms: float, *, thick: bool = True
) -> Line:
    shown = np.where(curve <= top_ms, curve, np.nan)
    return Line(name, tuple(times), tuple(shown), thick=thick, steps=True)


def _policy(name: str, recordings: Sequence[Recording], seed: int, batch: int) -> Policy:
    return Sequential() if name == SEQUENTIAL else POLICIES[name](recordings, seed, batch)
