"""PyTorch models as functions from tensors to tensors, whatever containers they take.

The order is that of PyTorch's pytrees: arguments, then keyword arguments. What is no tensor,
such as None or a number, is a constant of the model, and left out of the results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive.models.frontend.reader import Inference
from tvm_adaptive.values.agreement import numpy_dtype

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

_QUIET = threading.RLock()
# Results that are known to be no tensors.
_PLAIN = (int, float, complex, str, type(None))


@dataclasses.dataclass(frozen=True)
class FlatModel:
    """A model whose inputs and results are tensors in a fixed order."""

    names: tuple[str, ...]
    inputs: tuple[Any, ...]  # examples, or fake tensors of their types
    results: tuple[Any, ...]  # tensors of the types of the results
    module: Any  # from tensors to a tuple of tensors
    program: Any = None  # the model as torch.export has it, if it has

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Return inputs to trace the model with."""
        import torch

        return tuple(
            each.clone()
            if type(each) is torch.Tensor
            else torch.zeros(each.shape, dtype=each.dtype)
            for each in self.inputs
        )

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Run the model once, not in training; what it writes to state and inputs is undone."""
        with evaluated(self.module):
            inference = self.opened(inputs)
            return inference.outputs(inference.run())

    def opened(self, inputs: Sequence[Array]) -> Inference:
        """Return the model with its inputs; each inference starts from the same state."""
        import torch

        tensors = [_tensor_of(value) for value in inputs]
        state = _State(self.module, tensors)

        @torch.inference_mode()  # type: ignore[untyped-decorator]
        def run() -> Any:
            state.restore()
            try:
                results = self.module(*tensors)
            except BaseException:
                state.restore()
                raise
            state.forget_unwritten()
            return results

        def outputs(results: Any) -> list[Array]:
            try:
                return [_array_of(each) for each in results]
            finally:
                state.restore()

        return Inference(run, outputs)


def flat_program(program: Any) -> FlatModel:
    """Return a ``torch.export.ExportedProgram`` as a model of tensors."""
    import torch
    from torch.export.graph_signature import OutputKind

    signature = program.graph_signature
    (output,) = program.graph.find_nodes(op="output")
    # A result that is no tensor may stand there as it is.
    values = [getattr(each, "meta", {}).get("val") for each in output.args[0]]
    results = tuple(
        value
        for value, spec in zip(values, signature.output_specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT and isinstance(value, torch.Tensor)
    )
    leaves = leaves_of(program)
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    module = _flattened(program.module(), program.call_spec.in_spec, list(leaves.values()))
    return FlatModel(tuple(tensors), tuple(tensors.values()), results, module, program)


def leaves_of(program: Any) -> dict[str, Any]:
    """Return a program's inputs by name: fake tensors, and constants."""
    from torch.export.graph_signature import ConstantArgument, InputKind

    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    return {
        spec.arg.name: spec.arg.value
        if isinstance(spec.arg, ConstantArgument)
        else nodes[spec.arg.name].meta["val"]
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    }


def flat_module(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlatModel:
    """Return a module that ``torch.export`` cannot export as a model of tensors."""
    import torch

    pytree = torch.utils._pytree
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    named = dict(zip(_names_of(module, args, kwargs), leaves, strict=True))
    tensors = {name: leaf for name, leaf in named.items() if isinstance(leaf, torch.Tensor)}
    flat = _flattened(module, spec, leaves)
    copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in leaves]
    args, kwargs = pytree.tree_unflatten(copies, spec)
    state = _State(flat)
    try:
        with torch.no_grad():
            found = pytree.tree_leaves(module(*args, **kwargs))
    finally:
        state.restore()
    results = tuple(each for each in found if isinstance(each, torch.Tensor))
    kinds = {type(each).__name__ for each in found if not isinstance(each, (torch.Tensor, *_PLAIN))}
    if kinds:
        logger.warning("outputs in containers unknown to PyTorch are left out: %s", sorted(kinds))
    return FlatModel(tuple(tensors), tuple(tensors.values()), results, flat)


def _names_of(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Return names of the leaves of arguments: parameters of ``forward``, and keys."""
    import torch

    try:
        parameters = list(inspect.signature(module.forward).bind_partial(*args).arguments)
    except (TypeError, ValueError):  # of compiled modules, or with wrong arguments
        parameters = []
    parameters += [f"args_{place}" for place in range(len(parameters), len(args))]
    named = [*zip(parameters, args, strict=False), *kwargs.items()]
    names: list[str] = []
    for name, value in named:
        for path, _ in torch.utils._pytree.tree_flatten_with_path(value)[0]:
            keys = re.findall(r"\w+", torch.utils._pytree.keystr(path))
            names.append("_".join([name, *keys]))
    return names if len(set(names)) == len(names) else [f"input_{i}" for i in range(len(names))]


def _flattened(module: Any, spec: Any, leaves: Sequence[Any]) -> Any:
    """Return a module from tensors to a tuple of tensors; other leaves stay as they are."""
    import torch

    pytree = torch.utils._pytree

    class Flattened(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            self.training = False

        def train(self, _mode: bool = True) -> Any:
            return self  # programs have no modes

        def forward(self, *tensors: Any) -> Any:
            given = iter(tensors)
            filled = [next(given) if isinstance(each, torch.Tensor) else each for each in leaves]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            results = pytree.tree_leaves(self.module(*args, **kwargs))
            return tuple(each for each in results if isinstance(each, torch.Tensor))

    return Flattened()


class _State:
    """What an inference may overwrite: the buffers of a module, and its inputs."""

    def __init__(self, module: Any, inputs: Sequence[Any] = ()) -> None:
        buffers = [
            (each._buffers, name, buffer)
            for each in module.modules()
            for name, buffer in each._buffers.items()
            if buffer is not None
        ]
        given = dict(enumerate(inputs))
        tensors = buffers + [(given, place, tensor) for place, tensor in given.items()]
        self._kept = [(*each, part := _own_elements(each[2]), part.clone()) for each in tensors]
        self._is_reduced = False

    def restore(self) -> None:
        """Give all their values back."""
        for holder, name, tensor, part, value in self._kept:
            part.copy_(value)
            holder[name] = tensor

    def forget_unwritten(self) -> None:
        """Restore only what the first inference has written; the rest would cost time."""
        import torch

        if not self._is_reduced:
            self._is_reduced = True
            self._kept = [
                each
                for each in self._kept
                if each[0][each[1]] is not each[2] or not torch.equal(each[3], each[4])
            ]


def _own_elements(tensor: Any) -> Any:
    """Return the part of an expanded tensor whose elements each have memory of their own."""
    import torch

    if tensor.layout is torch.strided:
        for axis, (n, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            tensor = tensor.narrow(axis, 0, 1) if n > 1 and not step else tensor
    return tensor


def _tensor_of(value: Array) -> Any:
    """Return a tensor of its own memory."""
    import torch

    if value.dtype.name == "bfloat16":  # which numpy gives to no other library
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(value.copy())


def _array_of(tensor: Any) -> Array:
    """Return an array of its own memory."""
    import torch

    found = tensor.detach().clone().resolve_conj().resolve_neg()
    if found.dtype == torch.bfloat16:
        array: Array = found.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
        return array
    return np.array(found.numpy())


@contextlib.contextmanager
def evaluated(module: Any) -> Iterator[None]:
    """Keep a module out of training while inside; its parts get their modes back."""
    modes = [(each, each.training) for each in module.modules()]
    try:
        for each, _ in modes:
            each.training = False
        yield
    finally:
        for each, mode in modes:
            each.training = mode


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep PyTorch's exporters from printing; what they warn of is seen in the results.

    One thread at a time, as each gives back the streams that it has found.
    """
    out, err = io.StringIO(), io.StringIO()
    with _QUIET, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield
