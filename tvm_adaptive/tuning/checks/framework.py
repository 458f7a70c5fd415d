"""The framework that a network comes from: what outputs and latency are compared with."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_adaptive.errors import ImportMismatchError, summary_line
from tvm_adaptive.models import Network, largest_difference
from tvm_adaptive.models.network import Original
from tvm_adaptive.tuning.checks.library import UNTUNED_SHARE
from tvm_adaptive.tuning.checks.peers import Rivals, n_rivals, rivals_reserve_sec
from tvm_adaptive.tuning.session import RunContext
from tvm_adaptive.values.agreement import largest_size, perturbed

# Relative: another order of additions changes values by as much within a few layers.
_ROUNDING = 1e-6
# The largest of two runs is some two thirds of that of many; kernels differ in each layer.
_SPREAD_MARGIN = 3.0
# The share of the remaining budget that the first of these runs may take: without any, a
# network that rounds cannot be compared. Further ones only make the allowance more certain.
_FIRST_SHARE = 0.5
# Of an output's largest value: a wrong function in a late layer seldom changes more.
_COARSE = 0.1


class FrameworkReference:
    """The outputs of a network's own framework, and the frameworks that are timed beside it."""

    def __init__(
        self, context: RunContext, network: Network, inputs: Sequence[Any], *, is_here: bool
    ) -> None:
        self._context = context
        self._network = network
        self._inputs = inputs
        self._original = network.original
        self._run_sec = 0.0  # of its first inference, with starting it
        self.expected: list[Any] | None = None  # its outputs
        self._spreads: list[float] = []  # of each output, if the network rounds
        self.may_round = False  # untuned outputs differ, by what may be rounding
        has_file = self._original is not None and self._original.file is not None
        # What is timed in the end, with its rivals.
        self._timed = self._original if has_file and is_here else None
        if context.config.peers and not self.has_rivals:
            context.observer.note(
                "peers are left out: they run ONNX and PyTorch models on this machine's CPU"
            )

    @property
    def name(self) -> str:
        """Name and version; empty for a network that comes from no framework."""
        return "" if self._original is None else self._original.framework

    @property
    def has_rivals(self) -> bool:
        """Whether it and others are timed beside the library in the end."""
        return self._timed is not None

    @property
    def replaces_untuned(self) -> bool:
        """Whether it is timed, and the untuned network is not."""
        return self.has_rivals and self.expected is not None

    @property
    def reserve_sec(self) -> float:
        """Seconds that timing the frameworks takes in the end."""
        n_frameworks = n_rivals(self._timed, self._context.config.peers)
        return rivals_reserve_sec(n_frameworks, self._run_sec, self._context.budget.seconds)

    def run(self) -> None:
        """Compute the outputs; report why if that is impossible."""
        original = self._original
        if original is None:
            return
        budget = self._context.budget
        start_sec = budget.elapsed_sec
        try:
            # Where it is timed in the end, its process stays: importing PyTorch takes 2 to 3 s.
            with contextlib.nullcontext() if self.has_rivals else contextlib.closing(original):
                expected = original.run(self._inputs)
                self._run_sec = budget.elapsed_sec - start_sec
                if self._network.rounds:
                    self._spreads = self._own_spreads(original, expected)
                self.expected = expected
        except Exception as error:  # the framework's own errors, of any kind
            message = f"{original.framework} could not run it: {summary_line(error)}"
            self._context.observer.note(f"outputs are not checked: {message}")
            self._context.journal.write("error", where="original", message=message)

    def _own_spreads(self, original: Original, expected: Sequence[Any]) -> list[float]:
        """Return how far each output may be off where only roundings differ.

        Measured of the framework itself, by its other kernels and by inputs that differ by a
        rounding, as far as time allows; empty without any such run.
        """
        rng = np.random.default_rng(self._context.seed)
        pair = perturbed(self._inputs, _ROUNDING, rng)
        runs = [functools.partial(original.run, each) for each in pair]
        if original.run_plainly is not None:
            runs.append(functools.partial(original.run_plainly, self._inputs))
        budget, last_sec, others = self._context.budget, self._run_sec, list[list[Any]]()
        for run in runs:
            share = UNTUNED_SHARE if others else _FIRST_SHARE
            if budget.interrupted or last_sec > share * budget.left_sec:
                self._note_few_runs(len(others), len(runs))
                break
            start_sec = budget.elapsed_sec
            try:
                others.append(run())
            except Exception as error:  # the framework's own; the other runs tell, too
                message = f"its roundings: {summary_line(error)}"
                self._context.journal.write("error", where="original", message=message)
            last_sec = budget.elapsed_sec - start_sec
        spreads = []
        for place, one in enumerate(expected if others else ()):
            apart = [largest_difference([each[place]], [one]).max_abs for each in others]
            spreads.append(_SPREAD_MARGIN * max(filter(math.isfinite, apart), default=0.0))
        return spreads

    def _note_few_runs(self, n_runs: int, n_wanted: int) -> None:
        """Say that the budget does not suffice for all runs that show how the framework rounds."""
        if self._context.budget.interrupted:
            return
        text = (
            f"how far outputs of {self.name} move with their roundings is known of {n_runs} of "
            f"{n_wanted} runs"
        )
        self._context.observer.note(f"the budget is short: {text}")
        self._context.journal.write("short", what=text)

    def check_import(self, outputs: Sequence[Any]) -> None:
        """Compare the untuned network's outputs, if the framework has computed some."""
        if self.expected is None:
            return
        difference = largest_difference(outputs, self.expected)
        problem = self.problem(outputs, self.expected)
        known = {"framework": self.name, "agree": problem is None, "problem": problem}
        self._context.journal.write("original", **known, **difference._asdict())
        apart = f"{difference.max_abs:.2g} absolute, {difference.max_rel:.2g} relative"
        if problem is not None and self._network.rounds and not self._spreads:
            self.may_round = True
            self._context.observer.note(
                f"untuned, outputs differ from those of {self.name} (largest difference {apart}): "
                f"{problem}. That may be rounding, which could not be measured"
            )
            return
        if problem is not None:
            raise ImportMismatchError(
                f"Imported and untuned, {self._network.name} computes something else than "
                f"{self.name} (largest difference {apart}): {problem}. That comes from no tuned "
                "function, so that tuning would be useless. If that is rounding, allow more of "
                "it: finish.rtol, in a file for --config or in TuneConfig."
            )
        self._context.observer.note(f"outputs agree with {self.name}; largest difference {apart}")
        if coarse := self._coarsest_allowance(self.expected):
            self._context.observer.note(coarse)

    def _coarsest_allowance(self, expected: Sequence[Any]) -> str:
        """Say which allowance could hide a wrong function; empty if none could."""
        coarse = [
            (spread / size if size else math.inf, spread, size)
            for spread, size in zip(self._spreads, map(largest_size, expected), strict=False)
            if spread > _COARSE * size
        ]
        if not coarse:
            return ""
        _, spread, size = max(coarse)
        return (
            f"that agreement says little: {self.name}'s own outputs move so far with their "
            f"roundings that {spread:.2g} is allowed, of values up to {size:.2g}; compare the "
            "accuracy on data of your own"
        )

    def problem(self, outputs: Sequence[Any], expected: Sequence[Any]) -> str | None:
        """Say where a library's outputs disagree with a framework's; None if they agree."""
        rtol = self._context.config.finish.rtol
        return self._network.problem_beside_framework(outputs, expected, rtol, self._spreads)

    def rivals(self) -> Rivals:
        """Return the frameworks to time in turns with the library, which may be none."""
        return Rivals(self._context, self._timed, self._inputs, self.problem)

    def latency_sec(self, rivals: Rivals) -> float:
        """Return its own latency among others'; infinite if it was not timed."""
        own = [peer.secs for peer in rivals.timings if peer.framework == self.name]
        return statistics.median(own[0]) if own else math.inf

    def close(self) -> None:
        """End the framework's process."""
        if self._original is not None:
            self._original.close()
