"""A backend of ``torch.compile``: inference of fixed shapes on this machine's CPU.

PyTorch finds it by the package's entry point: ``torch.compile(model, backend="tvm_adaptive")``.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from tvm_adaptive.errors import AdaptiveError, InvalidOptionError, summary_line
from tvm_adaptive.models.frontend import network_of_program
from tvm_adaptive.models.inference import CompiledModel
from tvm_adaptive.tuning.embedding import compile_model

Function: TypeAlias = Callable[..., Any]

_OPTIONS = ("budget_sec", "trials", "seed", "config", "observer", "work_dir", "n_threads")
_VERSION = operator.attrgetter("_version")
# Without options. Most of the gain of a ResNet-18 comes in its first minute.
_DEFAULT_BUDGET_SEC = 60.0


_DYNAMIC = "torch.compile(..., dynamic=False) compiles a graph for each shape"
_SHARED = "its outputs share memory, and a compiled graph would return copies"


class _UnsupportedError(AdaptiveError):
    """A graph that the backend leaves to PyTorch, and why."""


def tvm_adaptive(
    graph: Any, examples: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Function:
    """Compile a graph of ``torch.compile`` with :func:`~tvm_adaptive.compile`.

    Weights are frozen: parameters and buffers become constants. What cannot be compiled
    runs in PyTorch as it is, after one warning that says why: graphs with gradients, dynamic
    shapes, random numbers, other devices, changed inputs or buffers, outputs that share memory in
    another way than below, or operators that TVM cannot import, and graphs whose compilation
    fails. If a weight changes later, the graph runs in PyTorch from then on, too; changes through
    ``.data``, and of tensors made in inference mode, cannot be seen. Outputs are contiguous; views
    of inputs, and of outputs that are whole tensors, share their memory as in PyTorch if they have
    the same type.

    Parameters
    ----------
    graph : torch.fx.GraphModule
    examples : sequence
        Inputs of the graph, weights among them. The search begins at the first call.
    options : mapping or None, default None
        ``budget_sec`` of each graph (default 60 if ``trials`` is missing, too), ``trials``,
        ``seed``, ``config``, ``observer``, ``work_dir`` and ``n_threads`` of
        :func:`~tvm_adaptive.compile`.

    Raises
    ------
    InvalidOptionError
        For other options.
    """
    given = dict(options or {})
    if unknown := sorted(set(given) - set(_OPTIONS)):
        raise InvalidOptionError(
            f"The backend tvm_adaptive has no options {', '.join(unknown)}, only "
            f"{', '.join(_OPTIONS)}."
        )
    if given.get("trials") is None:
        given.setdefault("budget_sec", _DEFAULT_BUDGET_SEC)
    try:
        return _Graph(graph, examples, given)
    except _UnsupportedError as error:
        _warn(error)
        return graph.forward  # type: ignore[no-any-return]


class _Graph:
    """A graph that is compiled in its first call, when PyTorch traces nothing."""

    def __init__(self, graph: Any, examples: Sequence[Any], options: dict[str, Any]) -> None:
        import torch

        self._graph, self._options = graph, options
        self._places = _places_of_inputs(graph, examples)
        outputs = _outputs_of(graph)
        self._outputs = [each is not None for each in outputs]
        self._views = _views_of(_inputs_of(graph, examples), outputs)
        held = [*graph.parameters(), *graph.buffers()]
        if torch.is_grad_enabled() and any(
            each.requires_grad for each in (*examples, *held) if isinstance(each, torch.Tensor)
        ):
            raise _UnsupportedError(
                "gradients are wanted; call the model within torch.no_grad() or inference_mode()"
            )
        # The model, and the weights that it was compiled with.
        self._compiled: tuple[CompiledModel, _Weights] | None = None
        self._is_eager = False
        self._lock = threading.Lock()  # threads that call at once compile once

    def __call__(self, *arguments: Any) -> Any:
        compiled = self._compiled or self._first_compiled(arguments)
        if compiled is not None and not compiled[1].are_same(arguments):
            self._run_eagerly("a weight has changed; call torch.compile again")
            compiled = None
        if compiled is None:
            return self._graph(*arguments)
        results = compiled[0](*(arguments[place] for place in self._places))
        results = iter(results if isinstance(results, tuple) else (results,))
        outputs = [next(results) if is_tensor else None for is_tensor in self._outputs]
        for place, view in self._views.items():
            outputs[place] = view.of((arguments if view.is_of_input else outputs)[view.place])
        return tuple(outputs)

    def _first_compiled(self, arguments: Sequence[Any]) -> tuple[CompiledModel, _Weights] | None:
        with self._lock:
            if self._compiled is None and not self._is_eager:
                try:
                    self._compiled = self._compile(arguments)
                except Exception as error:  # PyTorch's, TVM's, the machine's: of any kind
                    self._run_eagerly(error)
            return self._compiled

    def _run_eagerly(self, reason: Exception | str) -> None:
        self._is_eager, self._compiled = True, None
        _warn(reason)

    def _compile(self, arguments: Sequence[Any]) -> tuple[CompiledModel, _Weights]:
        import torch

        lifted = [place for place in range(len(arguments)) if place not in self._places]
        held = [*self._graph.parameters(), *self._graph.buffers()]
        # As they are before a search, in which another thread may change them.
        weights = _Weights(arguments, lifted, held)
        inputs = tuple(arguments[place].detach() for place in self._places)
        with torch.no_grad():
            module = _frozen(self._graph, arguments, self._places)
            # Core operators show what the graph changes.
            program = torch.export.export(module, inputs).run_decompositions()
        signature = program.graph_signature
        if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
            raise _UnsupportedError("it changes its inputs or buffers")
        network = network_of_program(program, "graph", {}, "the graph")
        return compile_model(network, **self._options), weights


class _Weights:
    """The weights of a graph as they were: inputs of it, by their places, and attributes."""

    def __init__(
        self, arguments: Sequence[Any], places: Sequence[int], held: Sequence[Any]
    ) -> None:
        import torch

        self._places = places
        self._lifted = [arguments[place] for place in places]
        self._all = [*self._lifted, *held]
        # Tensors of inference mode have no version.
        self._versioned = [each for each in self._all if not each.is_inference()]
        self._data_ptr = torch.Tensor.data_ptr
        self._state = self._present_state()

    def are_same(self, arguments: Sequence[Any]) -> bool:
        """Say whether none was replaced, written to, or given other memory.

        It is asked in each call, of hundreds of tensors: without a step of Python for each.
        """
        given = map(arguments.__getitem__, self._places)
        return all(map(operator.is_, given, self._lifted)) and self._present_state() == self._state

    def _present_state(self) -> tuple[list[int], list[int]]:
        return list(map(_VERSION, self._versioned)), list(map(self._data_ptr, self._all))


def _frozen(graph: Any, arguments: Sequence[Any], places: Sequence[int]) -> Any:
    """Return a module of a graph's inputs, with its weights as buffers."""
    import torch

    class Frozen(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.graph = graph
            for place, value in enumerate(arguments):
                if place not in places:
                    self.register_buffer(f"weight_{place}", value.detach().clone())

        def forward(self, *inputs: Any) -> Any:
            given = iter(inputs)
            filled = [
                next(given) if place in places else getattr(self, f"weight_{place}")
                for place in range(len(arguments))
            ]
            return tuple(each for each in self.graph(*filled) if each is not None)

    frozen = Frozen()
    frozen.training = False
    return frozen


def _places_of_inputs(graph: Any, examples: Sequence[Any]) -> list[int]:
    """Return which placeholders are no weights; raise if one is no tensor of fixed shape."""
    import torch

    places = []
    nodes = graph.graph.find_nodes(op="placeholder")
    inputs = _inputs_of(graph, examples)
    for place, (node, example, known) in enumerate(zip(nodes, examples, inputs, strict=True)):
        if not isinstance(example, torch.Tensor) or not isinstance(known, torch.Tensor):
            kind = type(example).__name__
            raise _UnsupportedError(f"its input {node.name} is of type {kind}: {_DYNAMIC}")
        if not all(isinstance(extent, int) for extent in known.shape):
            raise _UnsupportedError(
                f"its input {node.name} has the shape {tuple(known.shape)}: {_DYNAMIC}"
            )
        if example.device.type != "cpu":
            raise _UnsupportedError(f"its input {node.name} is on {example.device}, not on the CPU")
        # Dynamo marks parameters and buffers of modules, which keep their memory.
        is_weight = isinstance(example, torch.nn.Parameter) or hasattr(
            example, "_dynamo_static_input_type"
        )
        if not is_weight:
            places.append(place)
    if not places:
        raise _UnsupportedError("it has no inputs")
    return places


def _inputs_of(graph: Any, examples: Sequence[Any]) -> list[Any]:
    """Return the inputs as they were traced."""
    nodes = graph.graph.find_nodes(op="placeholder")
    pairs = zip(nodes, examples, strict=True)
    return [node.meta.get("example_value", example) for node, example in pairs]


def _outputs_of(graph: Any) -> list[Any]:
    """Return the outputs as they were traced; those that are no tensors are None."""
    import torch

    (output,) = graph.graph.find_nodes(op="output")
    found = []
    for node in output.args[0]:
        value = None if node is None else node.meta.get("example_value")
        if node is not None and not isinstance(value, torch.Tensor):
            raise _UnsupportedError(f"its output {node} is no tensor")
        found.append(value)
    if all(each is None for each in found):
        raise _UnsupportedError("it has no outputs")
    return found


@dataclasses.dataclass(frozen=True)
class _View:
    """An output that shares the memory of an input or of another output."""

    is_of_input: bool
    place: int
    size: Sequence[int]
    stride: Sequence[int]
    offset: int  # from the first element of that one

    def of(self, base: Any) -> Any:
        """Return the view of a tensor."""
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


def _views_of(inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[int, _View]:
    """Return the outputs that are views of inputs, or of outputs that are whole tensors.

    What follows a graph may write into one of them, which has to show in the other. Raises
    _UnsupportedError for other outputs that share memory.
    """
    bases = {_storage_of(each): (True, place, each) for place, each in enumerate(inputs)}
    n_inputs = Counter(map(_storage_of, inputs))
    for place, value in enumerate(outputs):
        if value is not None and _is_whole(value):
            bases.setdefault(_storage_of(value), (False, place, value))
    found = {}
    others: dict[int, list[Any]] = {}  # without a base, by their memory
    for place, value in enumerate(outputs):
        if value is None:
            continue
        base = bases.get(_storage_of(value))
        if base is None:
            others.setdefault(_storage_of(value), []).append(value)
            continue
        if base[2].dtype != value.dtype:
            raise _UnsupportedError(_SHARED)
        if n_inputs[_storage_of(value)] > 1:
            raise _UnsupportedError("its outputs are views of inputs that share memory")
        is_of_input, place_of_base, of = base
        if (is_of_input, place_of_base) != (False, place):
            offset = value.storage_offset() - of.storage_offset()
            found[place] = _View(is_of_input, place_of_base, value.shape, value.stride(), offset)
    if any(map(_have_common_elements, others.values())):
        raise _UnsupportedError(_SHARED)
    return found


def _have_common_elements(values: Sequence[Any]) -> bool:
    """Say whether tensors in one memory have elements in common, or other types."""
    if len(values) < 2 or len({value.dtype for value in values}) > 1:
        return len(values) > 1
    n_elements = values[0].untyped_storage().nbytes() // values[0].element_size()
    taken = np.zeros(n_elements, bool)
    for value in values:
        own = as_strided(taken[value.storage_offset() :], value.shape, value.stride())
        if own.any():
            return True
        own[...] = True
    return False


def _storage_of(value: Any) -> int:
    """Return what tells the memory of traced tensors apart."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return int(StorageWeakRef(value.untyped_storage()).cdata)


def _is_whole(value: Any) -> bool:
    """Say whether a tensor has all of its memory, in the order of its elements."""
    n_bytes = value.numel() * value.element_size()
    return value.is_contiguous() and bool(n_bytes == value.untyped_storage().nbytes())


def _warn(reason: Exception | str) -> None:
    text = reason if isinstance(reason, str) else summary_line(reason)
    warnings.warn(
        f"tvm_adaptive leaves a graph to PyTorch, uncompiled: {text}",
        RuntimeWarning,
        stacklevel=3,
    )
