"""Timers of a loaded module: with the same arguments, or with other weights in each run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from tvm_adaptive.runner.evaluator import Timer
from tvm_adaptive.runner.rotating_weights import Arena, is_worth_rotating
from tvm_adaptive.workers import device_session

_arena = Arena()


def timer_of(module: Any, dev: Any, args: Sequence[Any], preprocess: str = "") -> Timer:
    """Return a timer of a module's entry function; each call makes one warm-up run first."""

    def timer(number: int, repeat: int) -> Sequence[float]:
        # Without a minimum duration it makes exactly ``number * repeat`` runs.
        evaluator = module.time_evaluator(
            module.entry_name, dev, number=number, repeat=repeat, f_preproc=preprocess
        )
        times: Sequence[float] = evaluator(*args).results
        return times

    return timer


def rotating_timer_of(module: Any, args: Sequence[Any], weights: Sequence[int]) -> Timer | None:
    """Return a timer whose runs get other weights in turns; None if it is not worth the memory.

    In a network, the weights of all other layers pass through the caches between two runs. As
    that of :func:`timer_of`, each call makes one warm-up run first.
    """
    buffers = [(str(args[i].dtype), tuple(map(int, args[i].shape))) for i in weights]
    if not is_worth_rotating(buffers):
        return None
    sets = []
    for arrays in _arena.rotation(buffers):
        others = dict(zip(weights, map(device_session.shared, arrays), strict=True))
        sets.append([others.get(index, arg) for index, arg in enumerate(args)])
    turns = itertools.cycle(sets)
    # TVM's evaluator repeats the same arguments. A call from here costs a microsecond more,
    # for all candidates alike.
    function = module[module.entry_name]

    def timer(number: int, repeat: int) -> Sequence[float]:
        function(*next(turns))
        means = []
        for _ in range(repeat):
            start_sec = time.perf_counter()
            for each in itertools.islice(turns, number):
                function(*each)
            means.append((time.perf_counter() - start_sec) / number)
        return means

    return timer
