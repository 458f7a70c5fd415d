"""One run in a process of its own: `python -m benchmarks.one_run FOLDER`, see run.py."""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tvm.s_tir.meta_schedule import Profiler

import tvm_adaptive
from benchmarks.configs import config_of
from benchmarks.methods import METHODS, STOCK
from benchmarks.plan import RunSpec, write_outcome
from benchmarks.stock import SET_UP_SCOPE, tune_stock

SPEC_FILE = "spec.json"
# Folder of others' starter records, where the method begins with them.
STARTER = "starter"
_PR_SET_PDEATHSIG = 1  # Linux <sys/prctl.h>


def main(folder: Path) -> int:
    """Do the run that the folder's specification asks for."""
    die_with_parent()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.ERROR)
    spec = RunSpec(**json.loads((folder / SPEC_FILE).read_text()))
    method = METHODS[spec.method]
    start_sec = time.monotonic()
    _time_contexts()
    profiler = Profiler()
    with profiler:
        if method.tuner == STOCK:
            tune_stock(spec, method, folder)
        else:
            report = tvm_adaptive.tune(
                spec.workload,
                work_dir=folder,
                target=spec.target,
                budget_sec=spec.budget_sec,
                trials=spec.trials,
                seed=spec.seed,
                # Cold: what another run found must not help. Equal times are compared.
                config=config_of(method).replace(
                    store=_start_with_others(folder) if method.starter else "none",
                    use_all=True,
                ),
            )
            if report.interrupted:
                return 130
    write_outcome(
        folder,
        spec,
        status="done",
        seconds=time.monotonic() - start_sec,
        scopes={name: float(seconds) for name, seconds in profiler.get().items()},
        peak_mb=_peak_mb(),
    )
    return 0


def die_with_parent() -> None:
    """End this process with the one that started it: nobody would wait for its result."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _start_with_others(folder: Path) -> str:
    """Let the run begin with others' starter records; return its empty store."""
    warm_start = sys.modules["tvm_adaptive.tuning.warm_start"]
    choose = functools.partial(warm_start.starter_file_of, folder=folder / STARTER)
    warm_start.starter_file_of = choose  # type: ignore[attr-defined]
    return str(folder / "store.db")


def _peak_mb() -> float:
    """Return the megabytes that this process had at most.

    Not ``getrusage``, which remembers those of the process that started this one.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def _time_contexts() -> None:
    """Let MetaSchedule's profiler see what it costs to set the tasks up, ours included."""
    module = sys.modules["tvm_adaptive.tuning.tune"]
    create = module.contexts_of

    def timed(*args: Any, **options: Any) -> Any:
        with Profiler.timeit(SET_UP_SCOPE):
            return create(*args, **options)

    module.contexts_of = timed  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
