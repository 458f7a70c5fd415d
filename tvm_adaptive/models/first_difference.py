"""Find the function from which two builds of a network compute something else.

Both run in a worker. The outputs of their functions are compared one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tvm_adaptive._tvm import VirtualMachine, tensor
from tvm_adaptive.values.agreement import is_float, outputs_problem
from tvm_adaptive.workers import device_session

Array = npt.NDArray[Any]

# Of outputs that are kept at a time. A network with more runs several times.
_KEPT_BYTES = 1 << 28
# What TVM adds to the name of a function whose schedule packs a weight.
_PACKED = "_prepacked"


class FirstDifference(NamedTuple):
    """A call whose outputs are the first that differ."""

    function: str
    problem: str  # which value differs, and by how much


def first_difference(
    paths: tuple[str, str],  # of the reference, and of the other build
    inputs: Sequence[Array],
    device_kind: str,
    n_outputs: Mapping[str, int],
    rtol: float,
) -> FirstDifference | None:
    """Return the first call whose outputs differ; ``n_outputs`` has what both builds call."""
    start = 0
    while True:
        reference = _Kept(n_outputs, start)
        _run(paths[0], inputs, device_kind, reference)
        if not reference.calls:
            return None
        found = _Compared(n_outputs, start, calls=reference.calls, rtol=rtol)
        _run(paths[1], inputs, device_kind, found)
        if found.difference is not None:
            return found.difference
        start += len(reference.calls)


def _run(path: str, inputs: Sequence[Array], device_kind: str, watch: Callable[..., int]) -> None:
    where = device_session.place(device_kind)
    machine = VirtualMachine(device_session.load_once(path), where)
    machine.set_instrument(watch)
    machine["main"](*(tensor(value, device=where) for value in inputs))


@dataclasses.dataclass
class _Watch:
    """Sees the calls of a virtual machine; counts those of the network's functions."""

    n_outputs: Mapping[str, int]
    start: int  # the first call that is looked at
    n_calls: int = 0

    def __call__(self, _function: Any, name: str, is_before: bool, _result: Any, *args: Any) -> int:
        """Look at the arguments of a call, of which the last ones are its outputs."""
        name = name.removesuffix(_PACKED)
        if name in self.n_outputs:
            outputs = args[-self.n_outputs[name] :]
            if is_before:
                self.prepare(outputs)
            elif self.n_calls >= self.start:
                self.look(name, outputs)
            self.n_calls += not is_before
        return 0  # go on

    def prepare(self, outputs: Sequence[Any]) -> None:
        """Change what is in the buffers of outputs before a call."""

    def look(self, name: str, outputs: Sequence[Any]) -> None:
        """Look at the outputs of a call."""
        raise NotImplementedError


@dataclasses.dataclass
class _Kept(_Watch):
    """Keeps the outputs of some calls."""

    calls: list[tuple[str, list[Array]]] = dataclasses.field(default_factory=list)
    n_bytes: int = 0

    def look(self, name: str, outputs: Sequence[Any]) -> None:
        """Keep outputs while there is room for them."""
        if self.n_bytes < _KEPT_BYTES:
            arrays = [np.array(each.numpy()) for each in outputs]
            self.calls.append((name, arrays))
            self.n_bytes += sum(each.nbytes for each in arrays)


@dataclasses.dataclass(kw_only=True)
class _Compared(_Watch):
    """Compares the outputs of calls with those that were kept."""

    calls: list[tuple[str, list[Array]]]
    rtol: float
    difference: FirstDifference | None = None

    def prepare(self, outputs: Sequence[Any]) -> None:
        """Put NaN where a kernel that writes nothing would leave the other build's numbers."""
        for each in outputs:
            array = each.numpy()
            if is_float(array.dtype):
                each.copyfrom(np.full_like(array, np.nan))

    def look(self, name: str, outputs: Sequence[Any]) -> None:
        """Compare outputs unless a difference was found before."""
        place = self.n_calls - self.start
        if self.difference is not None or place >= len(self.calls):
            return
        expected_name, expected = self.calls[place]
        if name != expected_name:
            raise ValueError(f"call {self.n_calls} is of {name}, not of {expected_name}")
        problem = outputs_problem([each.numpy() for each in outputs], expected, self.rtol)
        if problem is not None:
            self.difference = FirstDifference(name, problem)
