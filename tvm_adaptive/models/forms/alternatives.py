"""The forms of a network's convolutions: their functions, and a network with some of them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import Constant, ExtractedTask, IRModule, PrimFunc, Target, relax
from tvm_adaptive._tvm.tensor_functions import has_fixed_arguments
from tvm_adaptive.models.forms.convolution import Convolution, convolution_of
from tvm_adaptive.models.forms.minimal_filtering import transformed_taps
from tvm_adaptive.models.forms.tiles import Tiles, tiles_of
from tvm_adaptive.models.forms.winograd import (
    input_function,
    output_function,
    product_function,
)
from tvm_adaptive.models.network import with_rewritten_main
from tvm_adaptive.values.forms import (
    DIRECT,
    FormKey,
    fastest_forms,
    form_costs,
)

# Results of a tile in each direction. Larger ones save more multiplications, but their
# rounding errors grow: F(6, 3) loses two digits more than F(4, 3).
TILE_SIZES = (2, 4)


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The functions that compute one convolution in another form."""

    tiles: Tiles
    names: tuple[str, str, str]


class Alternatives:
    """The forms of the convolutions in a prepared module."""

    def __init__(self, mod: IRModule, *, packed: bool) -> None:
        self.functions: dict[str, PrimFunc] = {}  # of all forms but the direct ones
        # Of functions, those of the module included; one without alternatives has none.
        self.keys: dict[str, FormKey] = {}
        self.calls: Counter[str] = Counter()  # in an inference, if the form is chosen
        self._steps: dict[tuple[str, str], _Steps] = {}
        self._packed = packed
        for name, calls in sorted(_calls_by_function(mod).items()):
            convolution = _convolution(mod, name)
            if convolution is not None and all(_has_constant_kernel(c, convolution) for c in calls):
                self._add(name, len(calls), convolution)

    def __bool__(self) -> bool:
        return bool(self.keys)

    @property
    def replaced(self) -> dict[str, str]:
        """A function of the module that each function of a form takes the place of."""
        return {step: name for (name, _), steps in self._steps.items() for step in steps.names}

    @property
    def weight_bytes(self) -> dict[str, int]:
        """The bytes of transformed weights in an inference's calls, by the names of functions."""
        found: dict[str, int] = {}
        for steps in self._steps.values():
            name = steps.names[1]
            weights = self.functions[name].params[1].ty
            n_items = math.prod(int(extent) for extent in weights.shape)
            found[name] = self.calls[name] * n_items * np.dtype(str(weights.dtype)).itemsize
        return found

    def steps(self, forms: Mapping[str, str]) -> dict[str, tuple[str, str, str]]:
        """Return the functions that take the place of one, by its name, in a choice of forms."""
        return {
            name: self._steps[name, forms[key.group]].names
            for name, key in self.keys.items()
            if key.form == DIRECT and forms.get(key.group, DIRECT) != DIRECT
        }

    def _add(self, name: str, n_calls: int, convolution: Convolution) -> None:
        batch, height, width, channels, *_ = convolution.shape
        group = f"3x3 of {batch}x{height}x{width}x{channels}"
        if convolution.padding != (1, 1):
            group += f" padded by {convolution.padding[0]} and {convolution.padding[1]}"
        # Every form of a group computes all of its convolutions.
        if convolution.rounds:
            group += ", rounded"
        # Sums of whole numbers are exact in tiles of two, whose transforms have halves only.
        for size in TILE_SIZES[:1] if convolution.rounds else TILE_SIZES:
            tiles = tiles_of(convolution, size)
            if tiles is None:
                return
            form = f"winograd-{size}x{size}"
            key = FormKey(group, form)
            names = (
                self._function(key, "input", n_calls, input_function(tiles)),
                self._function(
                    key, "product", n_calls, product_function(tiles, packed=self._packed)
                ),
                self._function(key, "output", n_calls, output_function(tiles)),
            )
            self._steps[name, form] = _Steps(tiles, names)
        self.keys[name] = FormKey(group, DIRECT)

    def _function(self, key: FormKey, what: str, n_calls: int, function: PrimFunc) -> str:
        """Return the name of a function; functions of a group's form that are equal are one."""
        structure = _tvm.workload_key(_tvm.normalize_mod(function))
        # Others' outputs may be equal: they depend on no input channels. Each belongs to one group.
        own = hashlib.sha256(f"{key.group} {structure}".encode()).hexdigest()[:8]
        stem = f"{key.form.replace('-', '_')}_{what}_{own}"
        self.functions.setdefault(stem, function)
        self.keys[stem] = key
        self.calls[stem] += n_calls
        return stem

    def tasks(self, target: Target) -> list[ExtractedTask]:
        """Return the functions of all forms as tuning tasks, ordered by name."""
        mod = IRModule(dict(self.functions))
        return _tvm.functions_as_tasks(mod, target, self.calls)

    def chosen(self, mod: IRModule, seconds: Mapping[str, float]) -> dict[str, str]:
        """Return the fastest form of each group, by the seconds of one call of each function."""
        calls = _calls_by_function(mod)
        n_calls = self.calls + Counter({name: len(each) for name, each in calls.items()})
        names = list(self.keys)
        costs = [n_calls[name] * seconds.get(name, float("inf")) for name in names]
        return fastest_forms(form_costs([self.keys[name] for name in names], costs))

    def applied(self, mod: IRModule, forms: Mapping[str, str]) -> IRModule:
        """Return a module that computes each group in the form of that name."""
        steps = {
            name: self._steps[name, forms[self.keys[name].group]] for name in self.steps(forms)
        }
        if not steps:
            return mod
        return with_rewritten_main(mod, _Rewriter(mod, steps, self.functions))


def _calls_by_function(mod: IRModule) -> dict[str, list[Any]]:
    """Return the calls of tensor functions in ``main``, by the functions' names."""
    found: dict[str, list[Any]] = defaultdict(list)
    for binding in _tvm.bindings_of(mod["main"]):
        call = _tvm.tensor_call_of(binding)
        if call is not None:
            found[str(call.args[0].name_hint)].append(call)
    return found


def _has_constant_kernel(call: Any, convolution: Convolution) -> bool:
    """Say whether the weights are a constant, and not only what is added to the result."""
    parameters = [_tvm.handle(each) for each in convolution.function.params]
    kernel = call.args[1].fields[parameters.index(_tvm.handle(convolution.kernel))]
    return isinstance(kernel, Constant)


def _convolution(mod: IRModule, name: str) -> Convolution | None:
    function = mod[name]
    is_fixed = _tvm.has_blocks(function) and has_fixed_arguments(function)
    return convolution_of(function) if is_fixed else None


@_tvm.mutator
class _Rewriter(_tvm.PyExprMutator):  # type: ignore[misc]
    """Replaces the calls of functions by those of their steps."""

    def __init__(
        self, mod: IRModule, steps: Mapping[str, _Steps], functions: Mapping[str, PrimFunc]
    ) -> None:
        super().__init__(mod)
        self._steps = steps
        self._functions = functions
        self._variables: dict[str, Any] = {}
        self._kernels: dict[tuple[int, int], Any] = {}

    def visit_call_(self, call: Any) -> Any:
        """Visit a call of a function that has steps."""
        call = super().visit_call_(call)
        steps = None
        if getattr(call.op, "name", "") == "relax.call_tir":
            steps = self._steps.get(str(call.args[0].name_hint))
        if steps is None:
            return call
        convolution = steps.tiles.convolution
        parameters = convolution.function.params
        arguments = dict(zip(map(_tvm.handle, parameters), call.args[1].fields, strict=False))
        data = arguments.pop(_tvm.handle(convolution.data))
        kernel = arguments.pop(_tvm.handle(convolution.kernel))
        first, second, third = steps.names
        tiles = self._call(first, data)
        products = self._call(second, tiles, self._transformed(kernel, steps.tiles))
        return self._new_call(third, [products, *arguments.values()], call.ty_args[0])

    def _transformed(self, kernel: Any, tiles: Tiles) -> Any:
        key = (_tvm.handle(kernel), tiles.size)
        if key not in self._kernels:
            weights = _tvm.data_of_constant(kernel).numpy()
            found = transformed_taps(weights, tiles.filtering)
            self._kernels[key] = relax.const(_tvm.tensor(found))
        return self._kernels[key]

    def _call(self, name: str, *arguments: Any) -> Any:
        result = self._functions[name].params[-1].ty
        shape = [int(extent) for extent in result.shape]
        return self.builder_.emit(
            self._new_call(name, arguments, relax.TensorType(shape, str(result.dtype)))
        )

    def _new_call(self, name: str, arguments: Any, result: Any) -> Any:
        if name not in self._variables:
            self._variables[name] = self.builder_.add_func(self._functions[name], name)
        return relax.call_tir(self._variables[name], list(arguments), result)
