"""Time the tuned library and the frameworks that run the same model, in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive.errors import summary_line
from tvm_adaptive.models import largest_difference
from tvm_adaptive.models.frontend import (
    FORMATS,
    PEERS,
    READER_ENV,
    open_peer,
    peer_names,
    time_peer,
)
from tvm_adaptive.models.network import Original
from tvm_adaptive.tuning.checks.library import LEAST_RUN_SEC
from tvm_adaptive.tuning.outcome import PeerTiming
from tvm_adaptive.tuning.session import RunContext
from tvm_adaptive.tuning.target import n_threads_of
from tvm_adaptive.workers.pool import WorkerPool
from tvm_adaptive.workers.scratch import ScratchFolder

# Begins the place of an error in the journal; the framework's name follows.
PEER_ERROR = "peer "
# An odd number, whose median is one of them; the range shows the noise of the machine.
_ROUNDS = 7
# Four repeats: enough for a median.
_TURN_SEC = 0.2
# One repeat.
_LEAST_TURN_SEC = 0.05
# Threads of the one before wait actively for a while.
_SETTLE_SEC = 0.05
# What a turn takes beside its repeats: the pause, the warm-up, the way to the worker.
_TURN_MARGIN = 2.0
# The share of the remaining budget that rounds may take: what follows them is short.
_ROUNDS_SHARE = 0.7
# The share of a budget that is reserved for frameworks; a short one has fewer of them.
_RESERVE_SHARE = 0.05
# Slow networks need fewer rounds, as disturbances are a smaller part of an inference.
_MOST_ROUNDS_SEC = 60.0
# The share of the remaining budget that starting one framework may take.
_START_SHARE = 0.4
_MOST_START_SEC = 120.0
# Import a framework, read a model, and run it, on a slow core.
_START_SEC = 4.0
# With less, importing a framework would be cut short as often as not.
_LEAST_START_SEC = 1.0
# The same where its process has already run the model: 0.15 s for an ONNX file of 11 MB.
_LEAST_OPEN_SEC = 0.2


@dataclasses.dataclass
class _Rival:
    """A framework that has opened the model."""

    name: str
    framework: str
    outputs: list[Any]
    pool: WorkerPool
    secs: list[float] = dataclasses.field(default_factory=list)


class Rivals:
    """The frameworks that a run compares its library with: the model's own, and others."""

    def __init__(
        self,
        context: RunContext,
        original: Original | None,
        inputs: Sequence[Any],
        problem: Callable[[Sequence[Any], Sequence[Any]], str | None],
    ) -> None:
        self._context = context
        # Says where the library's outputs disagree with a framework's.
        self._problem = problem
        self._original = original
        self._inputs = list(inputs)
        self._n_threads = n_threads_of(context.target)
        self._stack = contextlib.ExitStack()
        self._running: list[_Rival] = []
        self.timings: list[PeerTiming] = []

    def time(
        self,
        outputs: Sequence[Any],  # the library's
        # From a turn's seconds to seconds per inference; None after a failure, which it reports.
        time_tuned: Callable[[float], float | None],
    ) -> list[float]:
        """Time the tuned library and the frameworks in turns; return the library's seconds."""
        with self._stack:
            return self._time(outputs, time_tuned)

    def _time(
        self, outputs: Sequence[Any], time_tuned: Callable[[float], float | None]
    ) -> list[float]:
        self._open()
        budget = self._context.budget
        seconds = min(_ROUNDS_SHARE * budget.left_sec, _MOST_ROUNDS_SEC)
        n_turns = _ROUNDS * (1 + len(self._running))
        turn_sec = min(_TURN_SEC, max(_LEAST_TURN_SEC, seconds / (_TURN_MARGIN * n_turns)))
        end_sec = budget.elapsed_sec + seconds
        tuned_secs: list[float] = []
        longest_sec = 0.0
        while len(tuned_secs) < _ROUNDS and not budget.interrupted:
            start_sec, least_sec = budget.elapsed_sec, max(LEAST_RUN_SEC, longest_sec)
            # A framework that the end of the budget stops would lose its finished rounds.
            if tuned_secs and (start_sec >= end_sec or budget.left_sec < least_sec):
                break
            tuned_sec = time_tuned(turn_sec)
            if tuned_sec is None:
                break
            tuned_secs.append(tuned_sec)
            # Forwards and backwards: none always comes after the tuned library.
            for rival in self._running[:: -1 if len(tuned_secs) % 2 else 1]:
                self._take_turn(rival, turn_sec)
            longest_sec = max(longest_sec, budget.elapsed_sec - start_sec)
        if tuned_secs:
            self.timings = [self._timing(rival, outputs, tuned_secs) for rival in self._running]
        return tuned_secs

    def _open(self) -> None:
        """Start the frameworks; those that cannot run the model are reported and left out."""
        if self._original is None or self._original.file is None:
            return
        try:
            folder = self._stack.enter_context(ScratchFolder("peers", self._context.work_dir))
            path = self._original.file(folder)
            own = FORMATS[path.suffix].peer
        except Exception as error:  # the framework's own, of any kind
            self._leave_out(self._original.framework, summary_line(error))
            return
        for name in dict.fromkeys([own, *peer_names(self._context.config.peers)]):
            framework = self._original.framework if name == own else PEERS[name].framework
            if name not in PEERS or path.suffix not in PEERS[name].open:
                self._leave_out(framework, f"it does not read {path.suffix} files")
            else:
                self._start(name, framework, path)

    def _start(self, name: str, framework: str, path: Path) -> None:
        context, original = self._context, self._original
        assert original is not None
        kept = original.worker if framework == original.framework else None
        limit_sec = min(_MOST_START_SEC, _START_SHARE * context.budget.left_sec)
        if kept is not None:
            least_sec = _LEAST_OPEN_SEC
        else:  # of a program, another framework gets a file that is exported first
            least_sec = _START_SEC if path.suffix == ".pt2" else _LEAST_START_SEC
        if limit_sec < least_sec:
            self._leave_out(framework, "no time was left to start it")
            return
        pool = kept or WorkerPool(1, env=READER_ENV, server=context.server)
        if kept is None:  # who has lent it closes it
            self._stack.callback(pool.close)
        task = (name, path, self._inputs, self._n_threads, original.memory_bytes)
        (outcome,) = pool.map(open_peer, [task], limit_sec)
        if outcome.error is None:
            self._running.append(_Rival(name, framework, outcome.value, pool))
        else:
            self._leave_out(framework, summary_line(outcome.error))

    def _take_turn(self, rival: _Rival, turn_sec: float) -> None:
        time.sleep(_SETTLE_SEC)
        limit_sec = max(min(_MOST_START_SEC, self._context.budget.left_sec), turn_sec)
        (outcome,) = rival.pool.map(time_peer, [(turn_sec,)], limit_sec)
        time.sleep(_SETTLE_SEC)
        if outcome.error is None:
            rival.secs.append(outcome.value)
        else:
            self._running.remove(rival)
            self._leave_out(rival.framework, summary_line(outcome.error))

    def _timing(
        self, rival: _Rival, outputs: Sequence[Any], tuned_secs: Sequence[float]
    ) -> PeerTiming:
        difference = largest_difference(outputs, rival.outputs)
        problem = self._problem(outputs, rival.outputs)
        if problem is not None:
            self._context.observer.note(f"{rival.framework} computes something else: {problem}")
        secs = (tuple(rival.secs), tuple(tuned_secs))
        return PeerTiming(
            rival.name, rival.framework, self._n_threads, *secs, *difference, problem is None
        )

    def _leave_out(self, framework: str, reason: str) -> None:
        self._context.observer.note(f"{framework} is not compared: {reason}")
        self._context.journal.write("error", where=f"{PEER_ERROR}{framework}", message=reason)


def n_rivals(original: Original | None, peers: str) -> int:
    """Return the number of frameworks that run a model: its own, and the peers that are others."""
    if original is None:
        return 0
    return len({original.framework, *(PEERS[name].framework for name in peer_names(peers))})


def rivals_reserve_sec(n_frameworks: int, own_start_sec: float, budget_sec: float | None) -> float:
    """Return the seconds that starting and timing frameworks takes, for fast networks."""
    rounds_sec = _ROUNDS * (1 + n_frameworks) * _TURN_MARGIN * _TURN_SEC
    n_others = max(0, n_frameworks - 1)
    wanted_sec = rounds_sec + own_start_sec + n_others * max(own_start_sec, _START_SEC)
    return wanted_sec if budget_sec is None else min(wanted_sec, _RESERVE_SHARE * budget_sec)
