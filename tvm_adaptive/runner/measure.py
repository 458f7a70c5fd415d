"""Load an artifact, fill its arguments and time it, inside a worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import alloc_argument_common, start_thread_pool
from tvm_adaptive.errors import check_at_least, check_positive
from tvm_adaptive.runner.evaluator import Race, Timer, evaluate
from tvm_adaptive.runner.stopping import StoppingRule
from tvm_adaptive.runner.timers import rotating_timer_of, timer_of
from tvm_adaptive.values.agreement import numpy_dtype, random_array
from tvm_adaptive.values.trial import Timing
from tvm_adaptive.values.trial_log import BatchFacts
from tvm_adaptive.workers import device_session
from tvm_adaptive.workers.cores import take_free_core

RANDOM_FILL = "tvm.contrib.random.random_fill_for_measure"
CPU_CACHE_FLUSH = "cache_flush_cpu_non_first_arg"
# Shorter integers are data of quantised networks.
_INDEX_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """How to measure every candidate of a runner; see :func:`.evaluator.evaluate`."""

    rule: StoppingRule
    min_repeat_ms: float = 0.0
    max_sec: float | None = None
    # flush the CPU's caches before each micro-batch, which then is a single run
    cpu_cache_flush: bool = False
    race: Race | None = None  # against the incumbent of the task
    weights: tuple[int, ...] = ()  # indices of arguments that every inference shares; of a CPU
    # the kernel is timed in many batches: stay ready for it; else it gets new arguments
    is_kept: bool = False

    def __post_init__(self) -> None:
        check_at_least("min_repeat_ms", self.min_repeat_ms, 0)
        check_positive("max_sec", self.max_sec)

    def for_batch(self, facts: BatchFacts | None, *, noise: float | None = None) -> MeasureOptions:
        """Return the options for candidates of a task.

        They race against a known incumbent, if the noise of the machine is given.
        """
        if facts is None:
            return self
        race = None
        if noise is not None and facts.incumbent_sec is not None:
            race = Race(facts.incumbent_sec, noise)
        return dataclasses.replace(self, race=race, weights=facts.weights)

    @property
    def rotates_weights(self) -> bool:
        """Whether runs follow each other with other weights, as inferences do."""
        # Published algorithms time one set of arguments.
        return self.rule.runs_per_batch is None and not self.cpu_cache_flush


# (artifact_path, device_type, args_info as JSON objects, options) -> Timing
MeasureFunction = Callable[[str, str, Sequence[Any], MeasureOptions], Timing]


# Kernels that a worker stays ready for, the latest ones: each has its own arguments, of some
# megabytes. To load a library and to fill arguments takes as long as to time a small kernel.
_MAX_READY = 8


# By the artifact's path.
_ready: dict[str, Timer] = device_session.cache("timers")


def measure_artifact(
    artifact_path: str, device_type: str, args_info: Sequence[Any], options: MeasureOptions
) -> Timing:
    """Measure a built candidate on this worker's device, of this machine or leased."""
    if device_type == "cpu" and not device_session.is_elsewhere():
        give_threads_cores()
    else:
        options = dataclasses.replace(options, weights=())
    # One that is not kept gets new arguments, and so does the next repeat of the same kernel: the
    # ones before may lie in a slow place.
    timer = _ready.pop(artifact_path, None)
    if timer is None or not options.is_kept:
        module = device_session.load(artifact_path)
        dev = device_session.device_of_kind(device_type)
        fill = device_session.function(RANDOM_FILL)
        timer = timer_for(module, dev, fill, args_info, options)
    if options.is_kept:
        _ready[artifact_path] = timer
        if len(_ready) > _MAX_READY:
            del _ready[next(iter(_ready))]
    return evaluated(timer, options)


def give_threads_cores() -> None:
    """Start TVM's thread pool in this process, with one core for each thread that TVM binds."""
    start_thread_pool()
    take_free_core()


def timer_for(
    module: Any,
    dev: Any,
    fill: Callable[[Any], Any],
    args_info: Sequence[Any],
    options: MeasureOptions,
) -> Timer:
    """Fill the arguments of a loaded module at random and return a timer of it."""
    (args,) = alloc_argument_common(fill, dev, args_info, 1)
    for each in args:
        if _may_be_indices(str(each.dtype)):
            shape = [int(extent) for extent in each.shape]
            each.copyfrom(random_array(np.random.default_rng(0), shape, str(each.dtype)))
    dev.sync()
    timer = timer_of(module, dev, args, CPU_CACHE_FLUSH if options.cpu_cache_flush else "")
    if options.rotates_weights:
        timer = rotating_timer_of(module, args, options.weights) or timer
    return timer


def evaluated(timer: Timer, options: MeasureOptions) -> Timing:
    """Measure by a timer, with its options."""
    return evaluate(
        timer,
        options.rule,
        min_repeat_ms=options.min_repeat_ms,
        max_sec=options.max_sec,
        single_runs=options.cpu_cache_flush,
        race=options.race,
    )


def _may_be_indices(dtype: str) -> bool:
    """Say whether numbers of a type may be indices, which TVM's fill draws beyond any table."""
    kind = numpy_dtype(dtype)
    return kind.kind in "iu" and kind.itemsize >= _INDEX_BYTES
