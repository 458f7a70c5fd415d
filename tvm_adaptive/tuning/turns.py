"""Time compiled networks in turns: several libraries, or one with several numbers of threads."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tvm_adaptive.errors import WorkerError, summary_line
from tvm_adaptive.models.run import time_exported
from tvm_adaptive.tuning.session import RunContext
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.pool import WorkerPool

K = TypeVar("K", str, int)

_UNBOUND = {"TVM_BIND_THREADS": "0"}
# An odd number, of which a majority decides.
_COUNT_ROUNDS = 7
# Four repeats: enough for a median.
_TURN_SEC = 0.2
# Threads of the library before wait actively for some milliseconds.
_SETTLE_SEC = 0.05
# Of one turn; the first one also starts a process and loads the library.
_TURN_LIMIT_SEC = 120.0


def time_in_turns(
    libraries: Mapping[K, tuple[Path, int]],  # each with its number of threads
    inputs: Sequence[Any],
    n_rounds: int,
    server: ForkServer | None = None,  # starts the processes
    *,
    is_decided: Callable[[Mapping[K, Sequence[float]]], bool] = lambda _: False,
) -> dict[K, list[float]]:
    """Return the seconds of an inference in each round; each library has a process of its own.

    Rounds end early when those so far have decided.
    """
    secs: dict[K, list[float]] = {name: [] for name in libraries}
    with contextlib.ExitStack() as stack:
        if server is None:
            server = stack.enter_context(contextlib.closing(ForkServer()))
        # Bound or not alike, so that the numbers of threads are all that differs.
        envs = {k: {**thread_env(n), **_UNBOUND} for k, (_, n) in libraries.items()}
        pools = {
            name: stack.enter_context(contextlib.closing(WorkerPool(1, env=env, server=server)))
            for name, env in envs.items()
        }
        for number in range(n_rounds + 1):  # the first one loads the libraries
            # In another order in each round: none always comes after the same one.
            names = list(libraries)
            for place in np.random.default_rng(number).permutation(len(names)):
                name = names[place]
                time.sleep(_SETTLE_SEC)
                task = (str(libraries[name][0]), inputs, "cpu", _TURN_SEC)
                (outcome,) = pools[name].map(time_exported, [task], _TURN_LIMIT_SEC)
                if outcome.error is not None:
                    raise outcome.error
                if number:
                    secs[name].append(outcome.value)
            if is_decided(secs):
                break
    return secs


def _has_majority(secs: Mapping[K, Sequence[float]]) -> bool:
    """Say whether so many rounds agree which of two is faster that the others change nothing."""
    first, second = secs.values()
    n_won = sum(a <= b for a, b in zip(first, second, strict=True))
    return max(n_won, len(first) - n_won) > _COUNT_ROUNDS // 2


def time_thread_counts(
    context: RunContext, library: Path, inputs: Sequence[Any], n_cores: int
) -> dict[int, float]:
    """Return the seconds of an inference by number of threads: all cores, and fewer.

    Half as many are tried as long as that is faster. Empty, or without the rest, if a process
    failed, which is reported.
    """
    found: dict[int, float] = {}
    n_threads = n_cores
    while n_threads > 1 and not context.budget.interrupted:
        fewer = n_threads // 2
        pair = {count: (library, count) for count in (n_threads, fewer)}
        try:
            secs = time_in_turns(
                pair, inputs, _COUNT_ROUNDS, context.server, is_decided=_has_majority
            )
        except WorkerError as error:
            context.observer.note(f"numbers of threads are not compared: {summary_line(error)}")
            context.journal.write("error", where="threads", message=str(error))
            break
        ratio = statistics.median(b / a for a, b in zip(secs[n_threads], secs[fewer], strict=True))
        found.setdefault(n_threads, statistics.median(secs[n_threads]))
        # By the ratio within rounds: the machine's speed may change from pair to pair.
        found[fewer] = ratio * found[n_threads]
        if ratio >= 1.0:
            break
        n_threads = fewer
    if found:
        context.journal.write("threads", secs={str(count): sec for count, sec in found.items()})
    return found
