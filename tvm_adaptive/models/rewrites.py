"""Rewrites of a network before it is lowered: clips, vector functions, convolutions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import IRModule, relax, relax_patterns, te, topi
from tvm_adaptive.errors import InvalidOptionError


def split_clips(mod: IRModule) -> IRModule:
    """Write each clip of floats as a minimum of a maximum.

    TVM's layout conversion does not support ``clip`` (ReLU6): it would transpose to NCHW
    before each and back after it. It supports the other two.
    """
    pattern = relax_patterns.is_op("relax.clip")(*(relax_patterns.wildcard() for _ in range(3)))
    functions = {
        variable: relax_patterns.rewrite_call(pattern, _split_clip, function)
        if isinstance(function, relax.Function)
        else function
        for variable, function in mod.functions.items()
    }
    return IRModule(functions, attrs=mod.attrs)


def _split_clip(call: Any, _matches: Any) -> Any:
    x, *bounds = call.args
    dtype = str(x.ty.dtype)
    limits = [float(bound.value) for bound in bounds if hasattr(bound, "value")]
    if not dtype.startswith("float") or len(limits) < len(bounds):
        return call
    low, high = limits
    if not math.isinf(low):
        x = relax.op.maximum(x, relax.const(low, dtype))
    return x if math.isinf(high) else relax.op.minimum(x, relax.const(high, dtype))


def legalizations(*, vector_math: bool) -> dict[str, Callable[[Any, Any], Any]]:
    """Return legalizations of our own, for ``relax.transform.LegalizeOps``.

    TVM's layout conversion makes transposed convolutions with channels last where a neighbour
    has them, but TVM itself lowers those with channels first alone.

    Vector mathematics: LLVM turns each element of ``exp`` or ``erf`` into a call of the C
    library, whatever the schedule, which makes a GELU ten times slower. TVM's polynomials for
    float32 consist of additions, multiplications and shifts; their relative error is below
    4e-7, some three units in the last place. Other types stay as they are. One property is
    lost: ``erf`` of NaN is 1 (its GELU is still NaN).
    """
    found: dict[str, Callable[[Any, Any], Any]] = {
        "relax.nn.conv2d_transpose": _transposed_convolution
    }
    if vector_math:
        found |= {f"relax.{name}": _for_float32(name, *how) for name, how in _VECTORS.items()}
    return found


def _transposed_convolution(builder: Any, call: Any) -> Any:
    attrs = call.attrs
    layouts = [str(each) for each in (attrs.data_layout, attrs.kernel_layout, attrs.out_layout)]
    if layouts == ["NCHW", "IOHW", "NCHW"]:
        return call.op.get_attr("FLegalize")(builder, call)
    data, kernel = call.args
    data = _moved(builder, data, layouts[0], "NHWC")
    kernel = _moved(builder, kernel, layouts[1], "HWIO")
    names = ("strides", "padding", "output_padding", "dilation")
    numbers = {name: [int(each) for each in getattr(attrs, name)] for name in names}
    compute = functools.partial(_conv2d_transpose_nhwc, **numbers, groups=int(attrs.groups))
    result = builder.emit_te(compute, data, kernel, primfunc_name_hint="conv2d_transpose")
    return _moved(builder, result, "NHWC", layouts[2])


def _moved(builder: Any, value: Any, layout: str, wanted: str) -> Any:
    """Return a tensor in another order of its axes."""
    if layout == wanted:
        return value
    if sorted(layout) != sorted(wanted):
        raise InvalidOptionError(f"A transposed convolution in {layout} cannot be lowered.")
    axes = [layout.index(axis) for axis in wanted]
    return builder.emit_te(topi.transpose, value, axes, primfunc_name_hint="transpose")


def _conv2d_transpose_nhwc(
    data: Any,
    kernel: Any,
    *,
    strides: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Any:
    """Return a convolution of data with zeros between its elements; the kernel is mirrored."""
    n, _, _, c_in = (int(each) for each in data.shape)
    *size, _, c_out = (int(each) for each in kernel.shape)
    reach = [(size[axis] - 1) * dilation[axis] for axis in (0, 1)]
    before = [0, *(reach[axis] - padding[axis] for axis in (0, 1)), 0]
    after = [0, *(reach[axis] - padding[axis + 2] + output_padding[axis] for axis in (0, 1)), 0]
    spread = topi.nn.dilate(data, [1, strides[0], strides[1], 1], name="data_dilate")
    # A padding larger than the kernel cuts elements off.
    first, last = ([max(0, -each) for each in ends] for ends in (before, after))
    padded = topi.nn.pad(
        spread,
        [max(0, each) for each in before],
        [max(0, each) for each in after],
        name="data_pad",
    )
    height, width = (
        int(padded.shape[axis]) - first[axis] - last[axis] - reach[axis - 1] for axis in (1, 2)
    )
    n_each = c_in // groups
    rh, rw = (te.reduce_axis((0, each), name=name) for each, name in zip(size, "rs", strict=True))
    rc = te.reduce_axis((0, n_each), name="k")

    def element(b: Any, h: Any, w: Any, c: Any) -> Any:
        channel = rc if groups == 1 else c // c_out * n_each + rc
        place = (h + first[1] + rh * dilation[0], w + first[2] + rw * dilation[1])
        mirrored = (size[0] - 1 - rh, size[1] - 1 - rw)
        out = c if groups == 1 else c % c_out
        value = padded[b, place[0], place[1], channel]
        return te.sum(value * kernel[mirrored[0], mirrored[1], channel, out], axis=[rh, rw, rc])

    return te.compute((n, height, width, c_out * groups), element, name="conv2d_transpose_nhwc")


def _for_float32(
    operator: str, function: Callable[..., Any], *attributes: str
) -> Callable[[Any, Any], Any]:
    """Return a legalization that falls back to TVM's own for other types."""
    name = operator.removeprefix("nn.")

    def legalize(builder: Any, call: Any) -> Any:
        (x,) = call.args
        if str(x.ty.dtype) != "float32":
            return call.op.get_attr("FLegalize")(builder, call)
        values = [getattr(call.attrs, each) for each in attributes]
        return builder.call_te(function, x, *values, primfunc_name_hint=name)

    return legalize


def _sigmoid(x: Any) -> Any:
    return topi.divide(1.0, 1.0 + topi.fast_exp(-x))


def _gelu(x: Any) -> Any:
    return x * (0.5 + 0.5 * topi.fast_erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: Any) -> Any:
    # Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, section 2.
    inner = math.sqrt(2 / math.pi) * (x * (1.0 + 0.044715 * x * x))
    return x * (0.5 + 0.5 * topi.fast_tanh(inner))


# Functions by their operators, with the attributes that they take.
_VECTORS: dict[str, tuple[Any, ...]] = {
    "exp": (topi.fast_exp,),
    "erf": (topi.fast_erf,),
    "tanh": (topi.fast_tanh,),
    "sigmoid": (_sigmoid,),
    "nn.silu": (lambda x: x * _sigmoid(x),),
    "nn.gelu": (_gelu,),
    "nn.gelu_tanh": (_gelu_tanh,),
    "nn.softmax": (topi.nn.fast_softmax, "axis"),
}
