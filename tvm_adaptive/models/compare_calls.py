"""Compare two builds of a network call by call: which functions compute something else.

Both run in one worker, in turns: a call of the reference, then the same call of the other
build. Afterwards the other build gets the reference's outputs, so that each function is
judged on the reference's inputs and one wrong function does not affect the others. Where the
other build computes something in several steps, the result of the last one is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive._tvm import Tensor, VirtualMachine, tensor
from tvm_adaptive.models.packing import name_before_packing
from tvm_adaptive.values.agreement import (
    N_PERTURBED_PAIRS,
    ROUNDED_SHARE,
    differs_rarely,
    disagreement,
    is_float,
    is_nearly_one,
    outputs_problem,
    perturbed,
)
from tvm_adaptive.workers import device_session

Array = npt.NDArray[Any]

# What an instrument returns to a virtual machine.
_GO_ON, _SKIP = 0, 1
# The two sides of the comparison.
_REFERENCE, _OTHER = 0, 1


@dataclasses.dataclass
class ComparedCalls:
    """What a comparison of two builds has found, by the names of functions."""

    # How many calls were compared; those whose results show nothing are left out. 0 of functions
    # that the other build does not call: their callers compute the same without.
    n_compared: dict[str, int] = dataclasses.field(default_factory=dict)
    # Which value of the first wrong call differs, and by how much; in the order of the calls.
    problems: dict[str, str] = dataclasses.field(default_factory=dict)
    # The same where so few values differ that a rounding may explain it, but the reference was
    # not seen to round like that: a play-off tells.
    unclear: dict[str, str] = dataclasses.field(default_factory=dict)
    # Seconds of the fastest call in the other build: a rough time, of one or a few calls.
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)


def compare_calls(
    paths: tuple[str, str],
    inputs: Sequence[Array],
    device_kind: str,
    n_outputs: Mapping[str, int],
    rtol: float | Mapping[str, float],
    *,
    steps: Mapping[str, Sequence[str]] = MappingProxyType({}),
    skipped: Collection[str] = (),
    rounding_sec: float = 0.0,
    progress_file: str | None = None,
) -> ComparedCalls:
    """Run two builds of a network in turns and compare the outputs of each call.

    The first of the ``paths`` is the reference. ``n_outputs`` has the functions that
    are compared if both builds call them as often, in the same order; ``steps`` has those that
    the other build calls, in this order, instead of one of the reference. What is found of the
    last step is said of all. Functions in ``skipped`` are not run in the other build. For about
    ``rounding_sec``, functions of the reference run again to see what they round in another way.
    While a function of the other build runs, its name is in the ``progress_file``, which shows
    which one has crashed.
    """
    where = device_session.device_of_kind(device_kind)
    machines = [VirtualMachine(device_session.load_once(path), where) for path in paths]
    tensors = [tensor(value, device=where) for value in inputs]
    last = {name: those[-1] for name, those in steps.items()}
    calls = [_calls_of(machine, tensors, n_outputs, last) for machine in machines]
    # A build makes views instead of calls of what it recognises as reshapes.
    n_outputs = {name: n for name, n in n_outputs.items() if calls[0][name] == calls[1][name]}
    former = {name for those in steps.values() if those[-1] in n_outputs for name in those[:-1]}
    n_outputs = {name: n for name, n in n_outputs.items() if name not in former}
    turns = _Turns()
    reference = _Reference(n_outputs, turns, last)
    other = _Other(
        n_outputs,
        turns,
        reference,
        former=former,
        rtol=rtol,
        skipped=frozenset(skipped),
        rounding_sec=rounding_sec,
        progress_file=progress_file,
    )
    other.found.n_compared.update(dict.fromkeys(calls[_REFERENCE].keys() - calls[_OTHER].keys(), 0))
    failures: list[Exception] = []

    def run(side: int, watch: Callable[..., int]) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(turns.end, side)
            try:
                machines[side].set_instrument(watch)
                machines[side]["main"](*tensors)
            except Exception as error:
                failures.append(error)

    thread = threading.Thread(target=run, args=(_REFERENCE, reference), daemon=True)
    thread.start()
    run(_OTHER, other)
    thread.join()
    if failures:  # the first is the cause: it ends the other side
        raise failures[0]
    for those in steps.values():
        _say_of_all(those, other.found)
    return other.found


def _say_of_all(steps: Sequence[str], found: ComparedCalls) -> None:
    """Let the comparison of a last step's results count for the steps before it."""
    *former, last = steps
    for name in former:
        for known in (found.problems, found.unclear):
            if last in known:
                known.setdefault(name, known[last])
        if last in found.n_compared:
            found.n_compared[name] = max(found.n_compared.get(name, 0), found.n_compared[last])


def _calls_of(
    machine: VirtualMachine,
    tensors: Sequence[Any],
    n_outputs: Mapping[str, int],
    last: Mapping[str, str],
) -> Counter[str]:
    """Count the calls of functions in an inference, of which none is run.

    A function that the other build computes in steps counts as the last of them. Integers and
    truth values are zeros meanwhile: extents and branches depend on them.
    """
    found: Counter[str] = Counter()

    def count(_function: Any, name: str, is_before: bool, _result: Any, *args: Any) -> int:
        name = name_before_packing(name)
        if not is_before or name not in n_outputs:
            return _GO_ON
        found[last.get(name, name)] += 1
        for each in args[-n_outputs[name] :]:
            if str(each.dtype).startswith(("int", "uint", "bool")):
                each.copyfrom(np.zeros(each.shape, str(each.dtype)))
        return _SKIP

    machine.set_instrument(count)
    machine["main"](*tensors)
    return found


class _Turns:
    """Lets two threads work in turns, the reference first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._whose = _REFERENCE
        self._ended: set[int] = set()

    def wait(self, side: int) -> None:
        """Wait for the turn of a side; raise ValueError if the other side has ended before."""
        with self._changed:
            self._changed.wait_for(lambda: self._whose == side or 1 - side in self._ended)
            if self._whose != side:
                raise ValueError("the builds do not make the same calls")

    def pass_on(self, side: int) -> None:
        """Give the turn to the other side."""
        with self._changed:
            self._whose = 1 - side
            self._changed.notify_all()

    def end(self, side: int) -> None:
        """Note that a side makes no more calls."""
        with self._changed:
            self._ended.add(side)
            self._changed.notify_all()


class _Watch:
    """Sees the calls of a virtual machine's functions, each in its turn."""

    side: int

    def __init__(
        self,
        n_outputs: Mapping[str, int],
        turns: _Turns,
        last: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._n_outputs = n_outputs
        self._turns = turns
        self._last = last

    def name_of(self, name: str) -> str:
        """Return the name by which a function is compared."""
        name = name_before_packing(name)
        return self._last.get(name, name)

    def __call__(self, _function: Any, name: str, is_before: bool, _result: Any, *args: Any) -> int:
        """Look at the arguments of a call, of which the last ones are its outputs."""
        name = self.name_of(name)
        if name not in self._n_outputs:
            return _GO_ON
        outputs = args[-self._n_outputs[name] :]
        answer = _GO_ON
        if is_before:
            self._turns.wait(self.side)
            if self.begin(name, outputs):
                return _GO_ON
            answer = _SKIP  # there is no look after the call
        else:
            self.finish(name, outputs)
        self._turns.pass_on(self.side)
        return answer

    def begin(self, _name: str, _outputs: Sequence[Any]) -> bool:
        """Look at the buffers of outputs before a call; return False to skip it."""
        return True

    def finish(self, name: str, outputs: Sequence[Any]) -> None:
        """Look at the outputs of a call."""
        raise NotImplementedError


class _Reference(_Watch):
    """Keeps the latest call until the other side's is compared with it."""

    side = _REFERENCE
    name = ""
    outputs: Sequence[Array] = ()
    _function: Any = None
    _args: Sequence[Any] = ()

    def __call__(self, function: Any, name: str, is_before: bool, result: Any, *args: Any) -> int:
        """Look at the arguments of a call, of which the last ones are its outputs."""
        if self.name_of(name) not in self._n_outputs:
            return _GO_ON
        self._function, self._args = function, args
        answer = super().__call__(function, name, is_before, result, *args)
        if not is_before:  # what follows may write into the inputs
            self._turns.wait(self.side)
            self._args = ()
        return answer

    def neighbours(self, rtol: float, seed: int) -> list[list[Array]]:
        """Return what the latest call gives for inputs that are a little larger or smaller."""
        n_inputs = len(self._args) - len(self.outputs)
        # A function may also have extents, which are numbers.
        inputs = {
            i: each for i, each in enumerate(self._args[:n_inputs]) if isinstance(each, Tensor)
        }
        starts = [each.numpy() for each in inputs.values()]
        found = []
        for values in perturbed(starts, rtol, np.random.default_rng(seed)):
            changed = dict(zip(inputs, values, strict=True))
            changed |= enumerate(self.outputs, n_inputs)
            args = [
                tensor(changed[i], device=each.device) if i in changed else each
                for i, each in enumerate(self._args)
            ]
            self._function(*args)
            found.append([each.numpy() for each in args[n_inputs:]])
        return found

    def finish(self, name: str, outputs: Sequence[Any]) -> None:
        """Keep the outputs."""
        self.name, self.outputs = name, [np.array(each.numpy()) for each in outputs]


class _Other(_Watch):
    """Compares the outputs of each call with the reference's, and replaces them by those."""

    side = _OTHER

    def __init__(
        self,
        n_outputs: Mapping[str, int],
        turns: _Turns,
        reference: _Reference,
        *,
        former: Collection[str],
        rtol: float | Mapping[str, float],
        skipped: frozenset[str],
        rounding_sec: float,
        progress_file: str | None,
    ) -> None:
        super().__init__(n_outputs, turns)
        self._reference = reference
        self._former = former
        self._rtol = rtol
        self._skipped = skipped
        self._rounding_sec = rounding_sec
        self._progress_file = progress_file
        self._start_sec = 0.0
        self.found = ComparedCalls()

    def __call__(self, function: Any, name: str, is_before: bool, result: Any, *args: Any) -> int:
        """Look at the arguments of a call, of which the last ones are its outputs."""
        plain = name_before_packing(name)
        if plain not in self._former:
            return super().__call__(function, name, is_before, result, *args)
        if not is_before:
            self._end(plain)
            return _GO_ON
        # While the reference computes what the steps do.
        self._turns.wait(self.side)
        args[-1].copyfrom(wrong_everywhere(args[-1].numpy()))
        if plain in self._skipped:
            return _SKIP
        self._start(plain)
        return _GO_ON

    def _note(self, name: str) -> None:
        """Write which function runs to a file that outlives this process."""
        if self._progress_file is not None:
            Path(self._progress_file).write_text(name, encoding="utf-8")

    def _start(self, name: str) -> None:
        self._note(name)
        self._start_sec = time.perf_counter()

    def _end(self, name: str) -> None:
        seconds = time.perf_counter() - self._start_sec
        self.found.seconds[name] = min(seconds, self.found.seconds.get(name, math.inf))
        self._note("")

    def begin(self, name: str, outputs: Sequence[Any]) -> bool:
        """Fill the outputs with wrong values: a kernel that writes nothing has to show."""
        if name != self._reference.name:
            raise ValueError(f"a call is of {name}, not of {self._reference.name}")
        is_run = name not in self._skipped
        for each, expected in zip(outputs, self._reference.outputs, strict=True):
            each.copyfrom(wrong_everywhere(expected) if is_run else expected)
        if is_run:
            self._start(name)
        return is_run

    def finish(self, name: str, outputs: Sequence[Any]) -> None:
        """Compare the outputs unless an earlier call of the function was wrong."""
        self._end(name)
        expected = self._reference.outputs
        if name not in self.found.problems and not any(map(_is_undefined, expected)):
            rtol = self._rtol if isinstance(self._rtol, float) else self._rtol[name]
            arrays = [each.numpy() for each in outputs]
            problem = call_problem(arrays, expected, rtol)
            if problem is not None and not differs_rarely(expected, arrays, rtol):
                self.found.problems[name] = problem
            elif (
                problem is not None
                and name not in self.found.unclear
                and not self._is_rounding(arrays, rtol)
            ):
                self.found.unclear[name] = problem
            if not any(map(is_nearly_one, expected)):  # else a wrong kernel may be right by chance
                self.found.n_compared[name] = self.found.n_compared.get(name, 0) + 1
        for each, array in zip(outputs, expected, strict=True):
            each.copyfrom(array)

    def _is_rounding(self, found: Sequence[Array], rtol: float) -> bool:
        """Say whether the reference gives the same values for inputs that hardly differ."""
        neighbours: list[dict[int, Array]] = []
        for seed in range(N_PERTURBED_PAIRS):
            if self._rounding_sec <= 0:
                return False
            start_sec = time.perf_counter()
            pair = self._reference.neighbours(rtol, seed)
            self._rounding_sec -= time.perf_counter() - start_sec
            neighbours += [dict(enumerate(each)) for each in pair]
            expected = self._reference.outputs
            if disagreement(expected, found, rtol=rtol, neighbours=neighbours) is None:
                return True
        return False


def wrong_everywhere(expected: Array) -> Array:
    """Return an array of which every value is wrong, so that one that stays is noticed."""
    if is_float(expected.dtype):
        wrong = np.full_like(expected, np.nan)
        wrong[_is_nan(expected)] = 0
        return wrong
    if expected.dtype == np.bool_:
        return ~expected
    # Not off by one, which may be rounding: every second bit of the lowest byte is another.
    return expected ^ 0x55 if expected.dtype.kind in "iu" else np.zeros_like(expected)


def call_problem(found: Sequence[Array], expected: Sequence[Array], rtol: float) -> str | None:
    """Say which output of a call differs, and where; None if they agree.

    Unlike the outputs of a network, those of a function may be infinite: a mask is.
    """
    if all(np.isfinite(each.astype(np.float64)).all() for each in expected):
        return outputs_problem(found, expected, rtol)
    names = [f"output {number}" for number in range(len(expected))]
    return disagreement(expected, found, rtol=rtol, rounded_share=ROUNDED_SHARE, names=names)


def _is_undefined(expected: Array) -> bool:
    """Say whether more than half of a reference is NaN, which shows nothing."""
    return is_float(expected.dtype) and 2 * int(_is_nan(expected).sum()) > expected.size


def _is_nan(values: Array) -> Array:
    """Return which values are NaN, also for types that only another package knows."""
    return np.asarray(values != values)  # noqa: PLR0124
