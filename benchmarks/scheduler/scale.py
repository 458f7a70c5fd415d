"""How far the task scheduler carries: simulated devices and hosts, the real policy.

    python -m benchmarks.scheduler.scale --out scale.json

A hundred tasks with synthetic curves, 100,000 trials. Each *lane* (a host's cores, or one
of a cluster's nodes) searches and builds one batch at a time; each device measures one
candidate at a time, from one queue. As in the package: the policy chooses among tasks that
have no batch under way, as many batches may be under way as there are devices, and the
oldest is waited for. Seconds are simulated but for those that the policy takes to decide,
which are this machine's, and are waited for by all.

For each it gives trials per second; the share of their time that devices measure, lanes work
and the policy decides; and how much later, in trials, it reaches the latency that one
device reached after half its trials: what it costs to decide without the results of the
batches that are under way.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import write_figure
from benchmarks.scheduler.varied import varied_arms
from tvm_adaptive.task_scheduler.policy import DEFAULT, DynaTunePolicy
from tvm_adaptive.task_scheduler.slot_queue import ArmTable
from tvm_adaptive.testing.synthetic import SyntheticArm
from tvm_adaptive.values.trial import FloatArray

BATCH = 16
# Tasks of a run this long are large: their curves go on falling.
SLOWER = 10.0


@dataclasses.dataclass(frozen=True)
class World:
    """What is simulated.

    Attributes
    ----------
    n_devices, n_lanes : int
    search_sec : float
        Of one batch, whatever its size.
    build_sec : float
        Of one candidate on all cores of a lane.
    measure_sec : float
        Of one candidate on a device, on average.
    """

    n_devices: int
    n_lanes: int
    search_sec: float
    build_sec: float
    measure_sec: float


@dataclasses.dataclass
class Batch:
    """A batch under way: whose, and when its last candidate is measured."""

    arm: int
    latencies_ms: FloatArray
    done_sec: float


class Simulation:
    """One run; :meth:`run` returns what it shows."""

    def __init__(self, world: World, arms: tuple[SyntheticArm, ...], seed: int) -> None:
        self.world, self.arms = world, arms
        self.rng = np.random.default_rng(seed)
        self.arm_table = ArmTable(
            [arm.name for arm in arms], [arm.weight for arm in arms], [arm.flop for arm in arms]
        )
        options = dataclasses.replace(DEFAULT, slot_trials=BATCH, postpone_share=0.0)
        self.policy = DynaTunePolicy(options)
        self.devices = [0.0] * world.n_devices
        self.lanes = [0.0] * world.n_lanes
        self.waiting: list[Batch] = []
        self.n_sent = 0
        self.decide_sec = self.device_sec = self.lane_sec = 0.0
        self.curve: list[tuple[int, float]] = []

    def run(self, n_trials: int) -> dict[str, Any]:
        """Go on until so many trials are sent, and all are measured."""
        while self.n_sent < n_trials:
            now_sec = self._take_in(heapq.heappop(self.lanes))
            arms = self._choosable()
            start = time.perf_counter()
            decision = self.policy.choose(arms, self.rng)
            seconds = time.perf_counter() - start
            self.decide_sec += seconds
            assert decision.arm is not None
            self._send(decision.arm, decision.n_trials or BATCH, now_sec + seconds)
        end_sec = max(self.devices)
        while self.waiting:
            self._join(self.waiting.pop(0))
        world = self.world
        return {
            **dataclasses.asdict(world),
            "n_trials": self.n_sent,
            "seconds": end_sec,
            "trials_per_sec": self.n_sent / end_sec,
            "devices_busy": self.device_sec / (world.n_devices * end_sec),
            "lanes_busy": self.lane_sec / (world.n_lanes * end_sec),
            "deciding": self.decide_sec / end_sec,
            "decide_ms": 1e3 * self.decide_sec / (self.n_sent / BATCH),
            "curve": self.curve[:: max(1, len(self.curve) // 400)],
        }

    def _choosable(self) -> tuple[Any, ...]:
        arms = list(self.arm_table.arms)
        for batch in self.waiting:
            arms[batch.arm] = dataclasses.replace(arms[batch.arm], finished=True)
        return tuple(arms)

    def _take_in(self, now_sec: float) -> float:
        """Take in what is measured; wait for the oldest while too many are under way."""
        for batch in [batch for batch in self.waiting if batch.done_sec <= now_sec]:
            self.waiting.remove(batch)
            self._join(batch)
        limit = min(self.world.n_devices, len(self.arms) - 1)
        while len(self.waiting) > limit:
            oldest = self.waiting.pop(0)
            now_sec = max(now_sec, oldest.done_sec)
            self._join(oldest)
        return now_sec

    def _join(self, batch: Batch) -> None:
        self.arm_table.add_trials(batch.arm, batch.latencies_ms)
        self.curve.append((self.n_sent, self.arm_table.weighted_ms))

    def _send(self, k: int, n: int, now_sec: float) -> None:
        world, arm = self.world, self.arms[k]
        # The table has no batch that is under way, and no arm has two of them.
        first = self.arm_table.arms[k].n_trials
        latencies = arm.curve_ms(np.arange(first, first + n, dtype=np.float64))
        latencies *= 1.0 + arm.spread * self.rng.exponential(size=n)
        latencies[self.rng.random(n) < arm.failing] = np.nan
        lane_sec = world.search_sec + n * world.build_sec
        self.lane_sec += lane_sec
        ready_sec = now_sec + lane_sec
        heapq.heappush(self.lanes, ready_sec)
        done_sec = ready_sec
        for seconds in world.measure_sec * self.rng.uniform(0.5, 1.5, n):
            start_sec = max(ready_sec, heapq.heappop(self.devices))
            heapq.heappush(self.devices, start_sec + seconds)
            self.device_sec += seconds
            done_sec = max(done_sec, start_sec + seconds)
        self.arm_table.open_slot(k)
        self.arm_table.charge(k, lane_sec + n * world.measure_sec / world.n_devices)
        self.n_sent += n
        self.waiting.append(Batch(k, latencies, done_sec))


def trials_to(curve: list[tuple[int, float]], latency_ms: float) -> float:
    """Return after how many trials a run was as fast; NaN if never."""
    return next((float(n) for n, ms in curve if ms <= latency_ms), float("nan"))


def main() -> None:
    parser = argparse.ArgumentParser(description="the task scheduler with many devices")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--search-sec", type=float, default=0.5)
    parser.add_argument("--build-sec", type=float, default=0.1)
    parser.add_argument("--measure-sec", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    arms = tuple(
        dataclasses.replace(arm, tau_trials=SLOWER * arm.tau_trials)
        for arm in varied_arms(options.tasks, options.seed)
    )
    found = []
    print("| devices | lanes | trials/s | devices measure | lanes work | policy decides | trials |")
    print("|---|---|---|---|---|---|---|")
    for n_lanes in options.lanes:
        for n_devices in options.devices:
            times = (options.search_sec, options.build_sec, options.measure_sec)
            world = World(n_devices, n_lanes, *times)
            result = Simulation(world, arms, options.seed).run(options.trials)
            found.append(result)
            half = found[0]["curve"][len(found[0]["curve"]) // 2]
            later = trials_to(result["curve"], half[1]) / half[0]
            print(
                f"| {n_devices} | {n_lanes} | {result['trials_per_sec']:.1f} "
                f"| {result['devices_busy']:.0%} | {result['lanes_busy']:.0%} "
                f"| {result['deciding']:.1%} ({result['decide_ms']:.1f} ms) | {later:.2f} x |",
                flush=True,
            )
    write_figure(options.out, {"runs": found})


if __name__ == "__main__":
    main()
