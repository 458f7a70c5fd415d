"""How the throughput of a farm grows with its devices, on loopback.

    python -m benchmarks.micro.farm --out farm.json

TVM's own tracker and servers run as processes here; a kernel is simulated: it takes a
fixed time, and no core. The result is the throughput of each number of devices as a share of
that many times a device's own (devices over the seconds of a kernel), the time to get the
devices included, and what remains when one of four is killed on the way.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from benchmarks.loopback_farm import LoopbackFarm
from benchmarks.machine import write_figure
from tvm_adaptive._tvm import RunnerInput
from tvm_adaptive.runner.measure import MeasureOptions
from tvm_adaptive.values.trial import Timing

# Workers cannot import what was started as a program.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def main() -> None:
    parser = argparse.ArgumentParser(description="throughput of a farm on loopback")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--kernel-sec", type=float, default=0.5)
    parser.add_argument("--candidates", type=int, default=64, help="for each device")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = [one_farm(n, options, kill=False) for n in options.devices]
    found.append(one_farm(4, options, kill=True))
    write_figure(options.out, {"farms": found})


def one_farm(n_devices: int, options: argparse.Namespace, *, kill: bool) -> dict[str, Any]:
    """Measure on a farm of so many servers; ``kill``: end one of them half-way."""
    kernel_sec = options.kernel_sec
    n = options.candidates * n_devices
    inputs = [RunnerInput(str(kernel_sec), "cpu", []) for _ in range(n)]
    with LoopbackFarm(n_devices) as farm:
        runner = farm.connect(n_devices=n_devices, measure=simulate)
        with contextlib.closing(runner):
            list(runner.run(inputs[: 2 * n_devices]))
            if kill:
                half_sec = options.candidates * kernel_sec / 2
                threading.Timer(half_sec, farm.signal_server, (0, signal.SIGKILL)).start()
            start_sec = time.perf_counter()
            results = [future.result() for future in runner.run(inputs)]
            seconds = time.perf_counter() - start_sec
    n_errors = sum(result.error_msg is not None for result in results)
    share = n * kernel_sec / (n_devices * seconds)
    what = f"{n_devices} devices{', one killed half-way' if kill else ''}"
    print(f"{what}: {n} candidates, {n_errors} errors, {n / seconds:.2f}/s, {share:.3f} of ideal")
    return {
        "n_devices": n_devices,
        "killed": kill,
        "n": n,
        "n_errors": n_errors,
        "seconds": seconds,
        "share": share,
    }


def simulate(
    artifact_path: str, device_type: str, args_info: Sequence[Any], options: MeasureOptions
) -> Timing:
    """Take the seconds that the artifact's name says, on the device that is held."""
    from tvm_adaptive.runner.measure import RANDOM_FILL
    from tvm_adaptive.workers import device_session

    del device_type, args_info, options
    seconds = float(artifact_path)
    end_sec = time.monotonic() + seconds
    while (left_sec := end_sec - time.monotonic()) > 0:
        time.sleep(min(0.1, left_sec))
        device_session.function(RANDOM_FILL)  # fails once the device is gone
    return Timing(seconds, 0.0, 1, 1, "precise", seconds)


if __name__ == "__main__":
    main()
