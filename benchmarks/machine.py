"""The machine that figures belong to, and how noisy it is."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.stats import spread_of_samples
from tvm_adaptive.tuning.doctor import NOISY_SPREAD, time_fixed_kernel

_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "tvm-adaptive", "numpy", "scikit-learn", "xgboost-cpu")


def write_figure(path: Path, fields: Mapping[str, Any]) -> None:
    """Write what was found as JSON, with its origin."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**origin(), **fields}) + "\n", encoding="utf-8")


def origin() -> dict[str, Any]:
    """Return the fields that say when, where and at which commit something was found."""
    return {"unix_sec": round(time.time()), "machine": describe_machine()}


def describe_machine() -> dict[str, Any]:
    """Describe this machine and the installed packages."""
    return {
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "n_processors": os.cpu_count(),
        "memory_gb": _memory_gb(),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "not visible",
        "virtual": "hypervisor" in _read("/proc/cpuinfo"),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "commit": _commit(),
    }


def describe_noise(samples_ms: Sequence[float]) -> dict[str, Any]:
    """Return the spread of a fixed kernel's timings, and whether that is too much."""
    found = spread_of_samples(samples_ms)
    return {**found, "n": len(samples_ms), "noisy": found["spread"] > NOISY_SPREAD}


def measure_noise(seconds: float, n_threads: int | None) -> dict[str, Any]:
    """Time a fixed kernel in a process of its own; ``error`` where that fails.

    Parameters
    ----------
    seconds : float
    n_threads : int or None
        Of the kernel.
    """
    env = dict(os.environ)
    if n_threads is not None:
        env["TVM_NUM_THREADS"] = str(n_threads)
    command = [sys.executable, "-m", "benchmarks.machine", "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return describe_noise(json.loads(done.stdout.splitlines()[-1]))


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gb() -> float:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return round(pages / 2**30, 1)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="timings of a fixed kernel, as JSON")
    parser.add_argument("--seconds", type=float, default=60.0)
    print(json.dumps(time_fixed_kernel(parser.parse_args().seconds)))
