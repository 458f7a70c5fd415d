"""Networks of Relax operators, before they are prepared for a target."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive._tvm import (
    IRModule,
    PyExprMutator,
    Sequential,
    bindings_of,
    handle,
    mutator,
    nn,
    relax,
    relax_transform,
    result_type_of,
    tensor,
    with_main,
)
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.value_ranges import input_ranges, masks_in, output_scales
from tvm_adaptive.values.agreement import is_float, largest_size, outputs_problem
from tvm_adaptive.values.ranges import Range
from tvm_adaptive.workers.pool import WorkerPool

# Of the scale of an output: ONNX Runtime's sigmoid, whose scale is 1, is wrong by some 1e-7
# where its result is next to zero.
_FRAMEWORK_ERROR = 1e-6
_OUTPUT_NAMES = "output_names"


@dataclasses.dataclass(frozen=True)
class Original:
    """A network as its own framework runs it."""

    framework: str  # name and version, for messages
    # from the inputs, in the order of ``main``, to the outputs
    run: Callable[[Sequence[npt.NDArray[Any]]], list[npt.NDArray[Any]]]
    # The same with other kernels, which round otherwise; None if there are none.
    run_plainly: Callable[[Sequence[npt.NDArray[Any]]], list[npt.NDArray[Any]]] | None = None
    # A file with the model, which may be written to the given folder; None if there is none.
    file: Callable[[Path], Path] | None = None
    memory_bytes: int | None = None  # that a process may allocate which opens the file
    worker: WorkerPool | None = None  # that ``run`` uses, with the framework imported

    def close(self) -> None:
        """Release what :attr:`run` uses; a later call of it takes longer."""
        if self.worker is not None:
            self.worker.close()


@dataclasses.dataclass(frozen=True)
class Network:
    """A network with operators of Relax, not yet lowered, and its weights.

    Attributes
    ----------
    name : str
    mod : IRModule
        Its function ``main`` takes the inputs first and the parameters after them.
    params : dict of str to Tensor
        Weights by the name of the parameter of ``main``; empty when they are already
        constants in ``mod``.
    input_shapes : dict of str to tuple of int
        In the order of ``main``.
    input_dtypes : dict of str to str
    original : Original or None
        The network in the framework that it was imported from, where that can run it.
    sample : tuple of ndarray, or None
        The user's own inputs, in the order of ``main``; checks and timings of the
        whole network use them.
    """

    name: str
    mod: IRModule
    params: dict[str, Any]
    input_shapes: dict[str, tuple[int, ...]]
    input_dtypes: dict[str, str]
    original: Original | None = None
    sample: tuple[npt.NDArray[Any], ...] | None = None

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs, where the model's file has them."""
        attributes = main_of(self.mod).attrs
        names = attributes.get(_OUTPUT_NAMES) if attributes else None
        return [str(name) for name in names or ()]

    @property
    def rounds(self) -> bool:
        """Whether it rounds numbers to steps, of which the least difference may choose another."""
        return any(_is_rounding(each.value) for each in bindings_of(main_of(self.mod)))

    def inputs(self, seed: int = 0) -> list[npt.NDArray[Any]]:
        """Return the user's sample, or random inputs without one.

        Parameters
        ----------
        seed : int, default 0
            Of random inputs.
        """
        return self.random_inputs(seed) if self.sample is None else list(self.sample)

    def telling_inputs(self, seed: int = 0) -> list[npt.NDArray[Any]]:
        """Return the inputs, but floats and masks of a single number, which hides wrong elements.

        Such floats are random instead, and such masks let only a part pass.
        """
        rng, drawn = np.random.default_rng(seed), self.random_inputs(seed)
        found = []
        for name, own, random in zip(self.input_shapes, self.sample or drawn, drawn, strict=True):
            is_single = own.size > 1 and bool((own == own.flat[0]).all())
            if is_single and is_float(own.dtype):
                found.append(random)
            elif is_single and name in self._masks and own.flat[0] in (0, 1):
                found.append(_partial(own, rng))
            else:
                found.append(own)
        return found

    @functools.cached_property
    def _input_ranges(self) -> dict[str, Range]:
        return input_ranges(main_of(self.mod), self.input_dtypes)

    @functools.cached_property
    def _masks(self) -> frozenset[str]:
        return masks_in(main_of(self.mod), self._input_ranges)

    def random_inputs(self, seed: int = 0) -> list[npt.NDArray[Any]]:
        """Draw one input for each parameter of ``main``.

        Floats are standard normal. Integers and truth values are what
        :func:`~tvm_adaptive.models.value_ranges.input_ranges` finds: indices are valid in
        their tables, masks let everything pass.
        """
        rng, ranges = np.random.default_rng(seed), self._input_ranges
        inputs = []
        for name, shape in self.input_shapes.items():
            if name in ranges:
                low, high = map(int, ranges[name])
                values: npt.NDArray[Any] = rng.integers(low, high + 1, shape)
            else:
                values = rng.standard_normal(shape)
            inputs.append(np.asarray(values, self.input_dtypes[name]))
        return inputs

    def problem_beside_framework(
        self,
        outputs: Sequence[npt.NDArray[Any]],
        expected: Sequence[npt.NDArray[Any]],
        rtol: float,
        spreads: Sequence[float] = (),
    ) -> str | None:
        """Say where outputs disagree with those of a framework, which is not exact either.

        Parameters
        ----------
        outputs, expected : sequence of ndarray
            Of this network, and of the framework.
        rtol : float
            As of :func:`~tvm_adaptive.models.outputs_agree`.
        spreads : sequence of float
            How far each output may be off in any case, if the network rounds; see
            :attr:`rounds`.

        Returns
        -------
        str or None
            The output, the place, both values; None if they agree.
        """
        scales = output_scales(main_of(self.mod))
        # A bound may be far from all values: a clip to what the type holds, a mask's number.
        floors = [
            _FRAMEWORK_ERROR * min(scale, max(1.0, largest_size(each)))
            for scale, each in zip(scales, expected, strict=False)
        ]
        if any(spreads) and len(outputs) == len(expected) == len(spreads):
            rest = len(expected) - len(floors)
            floors = list(map(max, [*floors, *[0.0] * rest], spreads))
            # An integer of a step, too, may be another one.
            outputs = _as_floats(outputs, spreads)
            expected = _as_floats(expected, spreads)
        return outputs_problem(outputs, expected, rtol, floors=floors, names=self.output_names)


def _partial(mask: npt.NDArray[Any], rng: np.random.Generator) -> npt.NDArray[Any]:
    """Return a mask that lets only a part pass of what the given one lets pass, or the reverse."""
    mixed = rng.integers(0, 2, mask.shape)
    # The first of each row stays: the softmax of nothing is no number.
    (mixed if mask.shape[-1] > 1 else mixed.reshape(-1))[..., 0] = mask.flat[0]
    return mixed.astype(mask.dtype)


def _is_rounding(value: Any) -> bool:
    name = operator_of(value)
    if name in ("relax.round", "relax.quantize"):
        return True
    kinds = [str(each.ty.dtype) for each in (*value.args, value)] if name == "relax.astype" else []
    return bool(kinds) and "float" in kinds[0] and "int" in kinds[1]


def _as_floats(
    outputs: Sequence[npt.NDArray[Any]], spreads: Sequence[float]
) -> list[npt.NDArray[Any]]:
    """Return outputs of which the integers that have a spread are floats."""
    return [
        each.astype(np.float64) if spread > 0 and not is_float(each.dtype) else each
        for each, spread in zip(outputs, spreads, strict=True)
    ]


def network_of_nn(
    name: str,
    module: nn.Module,
    input_shapes: Mapping[str, tuple[int, ...]],
    draw: Callable[[np.random.Generator, str, tuple[int, ...]], npt.NDArray[np.float32]],
    seed: int,
) -> Network:
    """Export a module of ``relax.frontend.nn`` whose inputs and weights are float32."""
    dtype = "float32"
    spec = {"forward": {key: nn.spec.Tensor(shape, dtype) for key, shape in input_shapes.items()}}
    mod, parameters = module.export_tvm(spec=spec)
    mod = IRModule({"main": mod["forward"].with_attr("global_symbol", "main")})
    rng = np.random.default_rng(seed)
    weights = {
        key: tensor(draw(rng, key, tuple(int(extent) for extent in parameter.shape)))
        for key, parameter in parameters
    }
    return Network(name, mod, weights, dict(input_shapes), dict.fromkeys(input_shapes, dtype))


def network_of_relax(
    name: str, mod: IRModule, params: dict[str, Any], original: Original | None = None
) -> Network:
    """Return a Relax module as a network; parameters of ``main`` without a weight are inputs.

    What ``main`` returns in tuples within tuples becomes a single tuple, from first to last.
    """
    parameters = {str(variable.name): variable for variable in main_of(mod).params}
    if unknown := sorted(set(params) - set(parameters)):
        raise InvalidOptionError(
            f"params must name parameters of main but got {', '.join(unknown)}; main has "
            f"{', '.join(parameters)}."
        )
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for key, variable in parameters.items():
        if key in params:
            continue
        info = variable.ty
        if not isinstance(info, relax.TensorType) or info.shape is None:
            raise InvalidOptionError(f"Input {key} of main must be a tensor of known shape.")
        extents = extents_of(info.shape)
        if not all(isinstance(extent, int) for extent in extents):
            # A 1 for each open extent, which mostly is the batch.
            example = shape_text([e if isinstance(e, int) else 1 for e in extents])
            raise InvalidOptionError(
                f"Input {key} of main has the dynamic shape {shape_text(extents)}; fix it, for "
                f"example with --input-shape {key}={example} (input_shapes in Python)."
            )
        shapes[key] = tuple(int(extent) for extent in extents)
        dtypes[key] = str(info.dtype)
        if not _has_numpy_type(dtypes[key]):
            raise InvalidOptionError(
                f"Input {key} of main is of type {dtypes[key]}, which numpy does not support; give "
                "the model an input of float32 and convert it inside."
            )
    return Network(name, _with_flat_result(mod), params, shapes, dtypes, original)


def _with_flat_result(mod: IRModule) -> IRModule:
    """Return a module whose ``main`` returns tensors; raise InvalidOptionError if it cannot."""
    main = main_of(mod)
    result = result_type_of(main)
    parts = list(_parts_of(main.body.body, result))
    for place, (_, kind) in enumerate(parts):
        if not isinstance(kind, relax.TensorType):
            raise InvalidOptionError(
                f"Output {place} of main is of the kind {type(kind).__name__}; let main return "
                "tensors only, or tuples of them."
            )
    if not any(hasattr(each, "fields") for each in getattr(result, "fields", ())):
        return mod
    values, kinds = [value for value, _ in parts], [kind for _, kind in parts]
    body = relax.SeqExpr(main.body.blocks, relax.Tuple(values))
    ty = type(result)(kinds)  # of a tuple, too
    flat = relax.Function(main.params, body, ty, main.is_pure, main.attrs)
    return without_dead_bindings(relax_transform.Normalize()(with_main(mod, flat)))


def _parts_of(value: Any, kind: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what tuples within tuples hold, and its types."""
    if not hasattr(kind, "fields"):
        yield value, kind
        return
    for place, each in enumerate(kind.fields):
        is_known = isinstance(value, relax.Tuple)
        part = value.fields[place] if is_known else relax.TupleGetItem(value, place)
        yield from _parts_of(part, each)


def with_rewritten_main(mod: IRModule, rewriter: Any) -> IRModule:
    """Return a module with what a mutator of expressions makes of ``main``."""
    main = rewriter.visit_expr(mod["main"])
    return with_main(rewriter.builder_.get(), main)


@mutator
class _CallRewriter(PyExprMutator):  # type: ignore[misc]
    """Puts what a function makes of a call in its place, the last calls last."""

    def __init__(self, mod: IRModule, rewrite: Callable[[Any, Any], Any]) -> None:
        super().__init__(mod)
        self._rewrite = rewrite

    def visit_call_(self, call: Any) -> Any:
        """Rewrite a call after its arguments."""
        return self._rewrite(self.builder_, super().visit_call_(call))


def with_rewritten_calls(mod: IRModule, rewrite: Callable[[Any, Any], Any]) -> IRModule:
    """Return a module with what a function makes of the builder and each call in ``main``."""
    return with_rewritten_main(mod, _CallRewriter(mod, rewrite))


def without_dead_bindings(mod: IRModule) -> IRModule:
    """Return a module without second names of values and without those that nothing uses."""
    t = relax_transform
    return Sequential([t.CanonicalizeBindings(), t.DeadCodeElimination()])(mod)


def uses_of(mod: IRModule) -> Counter[int]:
    """Count the uses of each variable of ``main``, by its handle."""
    found: Counter[int] = Counter()

    def count(expression: Any) -> None:
        if isinstance(expression, relax.Var):
            found[handle(expression)] += 1

    for binding in bindings_of(mod["main"]):
        relax.analysis.post_order_visit(binding.value, count)
    relax.analysis.post_order_visit(mod["main"].body.body, count)
    return found


def with_output_names(mod: IRModule, names: Sequence[str]) -> IRModule:
    """Return an imported module that knows the names of its outputs."""
    return with_main(mod, main_of(mod).with_attr(_OUTPUT_NAMES, list(names)))


def main_of(mod: IRModule) -> relax.Function:
    """Return the function ``main`` of a Relax module; raise InvalidOptionError without one."""
    names = [str(variable.name_hint) for variable in mod.get_global_vars()]
    if "main" not in names or not isinstance(mod["main"], relax.Function):
        raise InvalidOptionError(
            f"The module must have a Relax function main but has {', '.join(names) or 'none'}."
        )
    return mod["main"]


def _has_numpy_type(dtype: str) -> bool:
    try:
        np.dtype(dtype)
    except TypeError:
        return False
    return True


def extents_of(shape: Any) -> list[int | str]:
    """Return a Relax shape as numbers, names of symbols, and expressions in brackets."""
    found: list[int | str] = []
    for extent in shape:
        try:
            found.append(int(extent))
        except TypeError:
            found.append(str(extent.name) if hasattr(extent, "name") else f"({extent})")
    return found


def shape_text(extents: Sequence[int | str]) -> str:
    """Return a shape as the command line takes it, ``1x3x224x224``, or in words."""
    return "x".join(map(str, extents)) or "a single value"


def known_extents(value: Any) -> list[int]:
    """Return the extents of a value of a network; none if it has none, or one is not known."""
    shape = getattr(getattr(value.ty, "shape", None), "values", ())
    extents = [int(getattr(n, "value", 0)) for n in shape]
    return extents if all(extents) else []


def operator_of(value: Any) -> str:
    """Return the name of the operator that a value is the call of; "" if it is none."""
    return str(getattr(getattr(value, "op", None), "name", ""))


def layouts_of(convolution: Any) -> list[str]:
    """Return the layouts of a convolution's data, kernel and result."""
    attrs = convolution.attrs
    return [str(each) for each in (attrs.data_layout, attrs.kernel_layout, attrs.out_layout)]


def are_float32(*values: Any) -> bool:
    """Say whether values of a network are tensors of float32."""
    return {str(each.ty.dtype) for each in values} == {"float32"}
