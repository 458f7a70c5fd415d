"""From a PyTorch model with fixed shapes to Relax, by the first way that works.

TVM's importer of programs, PyTorch's ONNX export of the program, and its older ONNX export,
which traces the module. If all fail, one message tells why each did.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import logging
import string
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from tvm_adaptive._tvm import IRModule, relax, result_type_of
from tvm_adaptive._tvm.torch_frontend import TorchConverter, relax_of_exported_program
from tvm_adaptive.errors import InvalidOptionError, summary_line
from tvm_adaptive.models.frontend.onnx_file import read_onnx
from tvm_adaptive.models.frontend.reader import is_of_memory
from tvm_adaptive.models.frontend.torch_core import core_of_plain
from tvm_adaptive.models.frontend.torch_flat import FlatModel, quiet
from tvm_adaptive.models.frontend.torch_misread import misread, reads_memory
from tvm_adaptive.models.frontend.torch_repairs import repair
from tvm_adaptive.models.network import extents_of, main_of, shape_text
from tvm_adaptive.workers.scratch import ScratchFolder

logger = logging.getLogger(__name__)

# TVM translates a condition to functions that cannot be fused; ONNX's can be written out.
_CONTROL = ("cond", "while_loop", "scan", "map_impl")
# Without users, these compute nothing; the last two are how PyTorch orders checks.
_CHECKS = ("_assert_", "sym_constrain_range", "with_effects", "getitem")
# The older exporter follows one side of a branch in Python, and only warns.
_DATA_DEPENDENT = "might cause the trace to be incorrect"


def relax_of_torch(source: str, model: FlatModel, unexported: str = "") -> IRModule:
    """Translate a model; raise InvalidOptionError with what stands in the way of each way."""
    held = [*model.inputs, *model.module.parameters(), *model.module.buffers()]
    if devices := sorted({str(each.device) for each in held if each.device.type != "cpu"}):
        raise InvalidOptionError(
            f"{source} is on {', '.join(devices)}. Models are read on the CPU, also to tune for a "
            "GPU: move the module and its example inputs there with .cpu(), and export it again."
        )
    if model.program is not None and any(map(reads_memory, _nodes_of(model.program))):
        raise InvalidOptionError(
            f"TVM cannot import {source}. It calls torch.as_strided on a tensor that is not "
            "contiguous, or on a part of one, and arrays outside of PyTorch have their elements in "
            "order. Write it with reshape, permute or indices."
        )
    ways: dict[str, Callable[[FlatModel], IRModule]] = {
        **({"TVM's importer": _by_program} if model.program is not None else {}),
        "torch.onnx.export": functools.partial(_by_onnx, dynamo=True),
        "its older exporter (dynamo=False)": functools.partial(_by_onnx, dynamo=False),
    }
    reasons = [f"torch.export: {unexported}"] if unexported else []
    for name, convert in ways.items():
        try:
            with quiet():
                mod = convert(model)
            _check_outputs(mod, model)
            if reasons:
                logger.info("%s is imported by %s, since: %s", source, name, "; ".join(reasons))
            return mod
        except Exception as error:  # PyTorch's, TVM's, ONNX's: of any kind
            if is_of_memory(error):
                raise
            reasons.append(f"{name}: {_reason_of(error)}")
    raise InvalidOptionError(
        f"TVM cannot import {source}. {'; '.join(reasons)}. Replace what is named in the model, or "
        "export it without."
    )


def _nodes_of(program: Any) -> Iterator[Any]:
    """Yield the nodes of a program, and of its branches and loops."""
    for module in program.graph_module.modules():
        yield from getattr(getattr(module, "graph", None), "nodes", ())


def _by_program(model: FlatModel) -> IRModule:
    program = _core_program(model.program)
    conversion = _Conversion()
    try:
        mod = relax_of_exported_program(program, conversion.convert)
    except Exception:
        if not conversion.reasons:
            raise
    if conversion.reasons:
        raise InvalidOptionError(conversion.summary)
    return mod


def _core_program(program: Any) -> Any:
    """Return a program of core operators that only computes the user's results, of tensors."""
    from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

    core = core_of_plain(program) or program.run_decompositions()
    graph, signature = core.graph, core.graph_signature
    (output,) = graph.find_nodes(op="output")
    kept = [
        (value, spec)
        for value, spec in zip(output.args[0], signature.output_specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT and isinstance(spec.arg, TensorArgument)
    ]
    output.args = (tuple(value for value, _ in kept),)
    signature.output_specs[:] = [spec for _, spec in kept]
    for node in reversed(graph.nodes):
        is_call = node.op == "call_function"
        if is_call and not node.users and node.target.__name__.startswith(_CHECKS):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    for spec in list(signature.input_specs):
        is_constant = spec.kind is InputKind.USER_INPUT and not isinstance(spec.arg, TensorArgument)
        if is_constant or (spec.kind is InputKind.TOKEN and not placeholders[spec.arg.name].users):
            graph.erase_node(placeholders[spec.arg.name])
            signature.input_specs.remove(spec)
    repair(graph)
    return core


class _Conversion:
    """One translation; an operator that fails is noted, and the rest translated."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    @property
    def summary(self) -> str:
        """Return all operators that failed, how often, and why the first one did."""
        return ", ".join(
            f"{name} ({self._counts[name]} call{'s' if self._counts[name] > 1 else ''}"
            f"{reason and ': '}{reason})"
            for name, reason in sorted(self.reasons.items())
        )

    def convert(self, node: Any, stock: TorchConverter | None, builder: Any) -> Any:
        """Translate a node; return zeros of its type if that fails."""
        name = str(node.target)
        try:
            if stock is None or node.target.__name__ in _CONTROL:
                raise NotImplementedError("no converter")
            if reason := misread(node):
                raise NotImplementedError(f"TVM leaves out {reason}")
            return _as_pytorch(stock(node), node.meta.get("val"), builder)
        except MemoryError:
            raise
        except Exception as error:  # TVM's own, of any kind
            self._counts[name] += 1
            self.reasons.setdefault(name, summary_line(error))
            return _zeros_like(node.meta["val"], builder)


def _as_pytorch(result: Any, value: Any, builder: Any) -> Any:
    """Return a node's result in PyTorch's type; raise ValueError if it is of another kind."""
    found = getattr(result, "ty", None)
    if not isinstance(found, relax.TensorType) or not hasattr(value, "dtype"):
        return result
    kind, expected = str(found.dtype), _dtype_of(value)
    is_of_kind = kind.rstrip(string.digits) == expected.rstrip(string.digits)
    # TVM's products are of float32.
    is_short = (kind, expected) == ("float32", "float64")
    if not is_of_kind or is_short or (found.shape is not None and _has_other_shape(found, value)):
        raise ValueError(f"its result {_mismatch(found, value)}")
    return result if kind == expected else builder.emit(relax.op.astype(result, expected))


def _zeros_like(value: Any, builder: Any) -> Any:
    """Return something of the type of a node's results, so that the rest can be checked."""
    if isinstance(value, (tuple, list)):
        return relax.Tuple([_zeros_like(each, builder) for each in value])
    return builder.normalize(relax.op.zeros(tuple(value.shape), _dtype_of(value)))


def _dtype_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _by_onnx(model: FlatModel, *, dynamo: bool) -> IRModule:
    import torch

    for package in ("onnx", "onnxscript") if dynamo else ("onnx",):
        if importlib.util.find_spec(package) is None:
            raise InvalidOptionError(f"it needs {package}: pip install 'tvm-adaptive[torch]'")
    exported = (model.program if dynamo else None) or model.module
    with ScratchFolder("onnx") as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = folder / "net.onnx"
        torch.onnx.export(
            exported,
            () if exported is model.program else model.tensors,
            str(path),
            input_names=list(model.names),
            dynamo=dynamo,
            verbose=False,
        )
        doubts = [each for each in caught if _DATA_DEPENDENT in str(each.message)]
        if doubts and model.program is None:  # a program has one path
            where = f"{doubts[0].filename}:{doubts[0].lineno}"
            raise InvalidOptionError(f"the path through the model depends on data ({where})")
        try:
            return read_onnx(path, {})
        except InvalidOptionError as error:
            text = str(error).replace(f"TVM cannot import {path}: ", "")
            raise InvalidOptionError(text.partition(". Replace them")[0]) from error


def _check_outputs(mod: IRModule, model: FlatModel) -> None:
    """Raise ValueError if the results are of other types than PyTorch's."""
    found = result_type_of(main_of(mod))
    types = list(getattr(found, "fields", [found]))
    if len(types) != len(model.results):
        raise ValueError(f"it has {len(types)} outputs instead of {len(model.results)}")
    for number, (each, expected) in enumerate(zip(types, model.results, strict=True), start=1):
        if str(each.dtype) != _dtype_of(expected) or _has_other_shape(each, expected):
            raise ValueError(f"its output {number} {_mismatch(each, expected)}")


def _has_other_shape(found: Any, tensor: Any) -> bool:
    return found.shape is None or extents_of(found.shape) != list(tensor.shape)


def _mismatch(found: Any, tensor: Any) -> str:
    shape = "unknown" if found.shape is None else shape_text(extents_of(found.shape))
    expected = f"{_dtype_of(tensor)} {shape_text(list(tensor.shape))}"
    return f"is {found.dtype} {shape}, but {expected} in PyTorch"


def _reason_of(error: BaseException) -> str:
    """Return the line of an error's first cause."""
    while error.__cause__ is not None and not isinstance(error, InvalidOptionError):
        error = error.__cause__
    kind = "" if isinstance(error, InvalidOptionError) else f"{type(error).__name__}: "
    return f"{kind}{summary_line(error)}".rstrip(".")
