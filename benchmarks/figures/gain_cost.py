"""DynaTune, figure 2: what operators gain, and what their tuning costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.charts import Bars, Figure
from tvm_adaptive.testing.recording import Recording, TaskRecording


def gain_cost(recordings: Sequence[Recording]) -> Figure:
    """Return one panel per network: each operator's share of the gain and of the seconds."""
    panels = []
    for recording in recordings:
        tasks = [task for task in recording.tasks if task.is_valid]
        gains = [task.weight * (first_ms(task) - task.final_ms) for task in tasks]
        whole = math.fsum(gains) or 1.0
        costs = [task.total_sec for task in tasks]
        panels.append(
            Bars(
                recording.network,
                "share of all operators, %",
                tuple(str(n) for n in range(len(tasks))),
                {
                    "gain": tuple(100 * gain / whole for gain in gains),
                    "cost": tuple(100 * cost / math.fsum(costs) for cost in costs),
                },
                stacked=False,
            )
        )
    caption = (
        "Each operator's share of the latency that tuning saves and of the seconds it takes, "
        "every operator tuned to the end of its recording. The gain is from the first "
        "successful trial to the best; DynaTune's figure 2 measures it from TVM's default "
        "schedule."
    )
    return Figure("gain-cost", caption, tuple(panels))


def first_ms(task: TaskRecording) -> float:
    """Return the milliseconds of the first trial that succeeded."""
    return float(next(ms for ms in task.latencies_ms if math.isfinite(ms)))
