"""Our own ways to lower operators: vector functions, whole tiles, transposed convolutions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import Constant, relax, te, tirx, topi
from tvm_adaptive._tvm.vector_unit import VectorUnit
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.network import layouts_of
from tvm_adaptive.models.rewrites.concatenation import concatenation
from tvm_adaptive.models.rewrites.grouped import grouped_legalizations
from tvm_adaptive.models.rewrites.normalization import normalization_legalizations
from tvm_adaptive.models.rewrites.pooling import pooling_legalizations
from tvm_adaptive.models.rewrites.row_functions import row_legalizations
from tvm_adaptive.models.rewrites.whole_tiles import Legalization, whole_tile_legalizations


def legalizations(*, vector_math: bool, unit: VectorUnit | None) -> dict[str, Legalization]:
    """Return legalizations of our own, for ``relax.transform.LegalizeOps``.

    TVM's layout conversion makes transposed convolutions with channels last where a neighbour
    has them, but TVM itself lowers those with channels first alone.

    Vector mathematics: LLVM turns each element of ``exp`` or ``erf`` into a call of the C
    library, whatever the schedule, which makes a GELU ten times slower. TVM's polynomials for
    float32 consist of additions, multiplications and shifts; their relative error is below
    4e-7, some three units in the last place. Other types stay as they are. One property is
    lost: ``erf`` of NaN is 1 (its GELU is still NaN).

    With ``unit``, of a processor, products and convolutions are lowered to whole tiles,
    concatenations so that vectors lie within their parts, and maxima without padding.

    Everywhere, the place of an extreme is one of the tensor's, an index of a look-up stands for
    the nearest row of the table, and the variance of groups and images is exact.
    """
    own: list[dict[str, Legalization]] = [{"relax.nn.conv2d_transpose": _transposed_convolution}]
    own.append({f"relax.{name}": functools.partial(_place_of, name) for name in _EXTREMES})
    own.append({"relax.take": _take})
    if unit is not None:
        own += [whole_tile_legalizations(unit), grouped_legalizations(unit)]
        own += [pooling_legalizations(), {"relax.concat": concatenation}]
    if vector_math and unit is not None:
        own.append(row_legalizations(unit.lanes))
    if vector_math:
        own.append({f"relax.{name}": _for_float32(name, *how) for name, how in _VECTORS.items()})
    own.append(normalization_legalizations())
    found: dict[str, list[Legalization]] = {}
    for name, legalize in itertools.chain.from_iterable(each.items() for each in own):
        found.setdefault(name, []).append(legalize)
    return {name: functools.partial(_first_of, tries) for name, tries in found.items()}


def _first_of(tries: Sequence[Legalization], builder: Any, call: Any) -> Any:
    """Lower a call by the first of our own legalizations that does, or else as TVM does."""
    lowered = (each(builder, call) for each in tries)
    found = next((each for each in lowered if each is not None), None)
    return call.op.get_attr("FLegalize")(builder, call) if found is None else found


def _place_of(name: str, builder: Any, call: Any) -> Any:
    """Lower ``argmax`` or ``argmin``: of what is all the least number, TVM's place is -1.

    Its search begins at place -1 with the least finite number, which no -inf exceeds.
    """
    axis = None if call.attrs.axis is None else int(call.attrs.axis)

    def compute(x: Any) -> Any:
        place = _EXTREMES[name](x, axis, bool(call.attrs.keepdims))
        return topi.maximum(place, tirx.const(0, place.dtype))

    return builder.call_te(compute, call.args[0], primfunc_name_hint=name)


def _take(builder: Any, call: Any) -> Any | None:
    """Lower a look-up by indices of which any number is possible: TVM reads beside the table."""
    table, places = call.args
    is_tensor = isinstance(places.ty, relax.TensorType)
    if str(call.attrs.mode) != "fast" or isinstance(places, Constant) or not is_tensor:
        return None
    return builder.call_te(topi.take, table, places, call.attrs.axis, mode="clip")


def _transposed_convolution(builder: Any, call: Any) -> Any | None:
    attrs = call.attrs
    layouts, (data, kernel) = layouts_of(call), call.args
    # Sums in another type than the data's are TVM's.
    if layouts == ["NCHW", "IOHW", "NCHW"] or data.ty.dtype != call.ty.dtype:
        return None
    data = _moved(builder, data, layouts[0], "NHWC")
    kernel = _moved(builder, kernel, layouts[1], "HWIO")
    names = ("strides", "dilation", "output_padding", "padding")
    strides, dilation, more, padding = ([int(n) for n in getattr(attrs, name)] for name in names)
    places = [int(each) for each in list(data.ty.shape)[1:3]]  # the batch may be open
    sizes = [int(each) for each in kernel.ty.shape]
    spans = [
        _Span.of(
            places[axis],
            (sizes[axis] - 1) * dilation[axis],
            strides[axis],
            padding=padding[axis::2],
            more=more[axis],
        )
        for axis in (0, 1)
    ]
    kernel = _filled(builder, kernel, strides, dilation)
    compute = functools.partial(_conv2d_transpose_nhwc, spans=spans, groups=int(attrs.groups))
    result = builder.emit_te(compute, data, kernel, primfunc_name_hint="conv2d_transpose")
    return _moved(builder, result, "NHWC", layouts[2])


def _filled(builder: Any, kernel: Any, strides: Sequence[int], dilation: Sequence[int]) -> Any:
    """Return a kernel with zeros for what dilation skips, and up to a multiple of the stride.

    Kernels are constants nearly always: this is computed when the network is prepared.
    """
    if any(each != 1 for each in dilation):
        spread = functools.partial(topi.nn.dilate, strides=[*dilation, 1, 1])
        kernel = builder.emit_te(spread, kernel, primfunc_name_hint="kernel_dilate")
    sizes = [int(each) for each in kernel.ty.shape][:2]
    after = [-size % stride for size, stride in zip(sizes, strides, strict=True)]
    if any(after):
        pad = functools.partial(topi.nn.pad, pad_before=[0] * 4, pad_after=[*after, 0, 0])
        kernel = builder.emit_te(pad, kernel, primfunc_name_hint="kernel_pad")
    return kernel


def _moved(builder: Any, value: Any, layout: str, wanted: str) -> Any:
    """Return a tensor in another order of its axes."""
    if layout == wanted:
        return value
    if sorted(layout) != sorted(wanted):
        raise InvalidOptionError(f"A transposed convolution in {layout} cannot be lowered.")
    axes = [layout.index(axis) for axis in wanted]
    return builder.emit_te(topi.transpose, value, axes, primfunc_name_hint="transpose")


def _conv2d_transpose_nhwc(data: Any, kernel: Any, *, spans: Sequence[_Span], groups: int) -> Any:
    """Return a transposed convolution with channels last, without the zeros between its data.

    With stride s, every s-th element of the kernel meets a result: those of its place within s
    (sub-pixel convolution, Shi et al., CVPR 2016).
    """
    n, c_in = data.shape[0], int(data.shape[3])
    c_out = int(kernel.shape[3])
    padded = topi.nn.pad(
        data,
        [0, *(each.before for each in spans), 0],
        [0, *(each.after for each in spans), 0],
        name="data_pad",
    )
    n_each = c_in // groups
    reductions = zip(spans, "rs", strict=True)
    taps = [te.reduce_axis((0, each.n_taps), name=name) for each, name in reductions]
    rc = te.reduce_axis((0, n_each), name="k")

    def element(b: Any, h: Any, w: Any, c: Any) -> Any:
        channel = rc if groups == 1 else c // c_out * n_each + rc
        out = c if groups == 1 else c % c_out
        places = zip(spans, (h, w), taps, strict=True)
        (y, row), (x, column) = (each.indices(place, tap) for each, place, tap in places)
        value = padded[b, y, x, channel] * kernel[row, column, channel, out]
        return te.sum(value, axis=[*taps, rc])

    shape = (n, *(each.extent for each in spans), c_out * groups)
    return te.compute(shape, element, name="conv2d_transpose_nhwc")


@dataclasses.dataclass(frozen=True)
class _Span:
    """What a transposed convolution does along one axis."""

    extent: int  # of the result
    stride: int
    cut: int  # results that padding removes at the beginning
    n_taps: int  # elements of the kernel that meet a result
    before: int  # zeros before the data
    after: int  # zeros behind the data

    @classmethod
    def of(cls, n: int, reach: int, stride: int, *, padding: Sequence[int], more: int) -> _Span:
        """Return the span of an axis with ``n`` values; the kernel's last element is ``reach``."""
        first, last = padding
        extent = (n - 1) * stride + reach + 1 - first - last + more
        n_taps = -(-(reach + 1) // stride)
        before = max(0, n_taps - 1 - first // stride)
        after = max(0, (extent - 1 + first) // stride - (n - 1))
        return cls(extent, stride, first, n_taps, before, after)

    def indices(self, place: Any, tap: Any) -> tuple[Any, Any]:
        """Return the indices of the padded data and of the kernel for a result."""
        shifted = place + self.cut
        return shifted // self.stride + self.before - tap, shifted % self.stride + self.stride * tap


def _for_float32(operator: str, function: Callable[..., Any], *attributes: str) -> Legalization:
    """Return a legalization that leaves other types to TVM."""
    name = operator.removeprefix("nn.")

    def legalize(builder: Any, call: Any) -> Any | None:
        (x,) = call.args
        if str(x.ty.dtype) != "float32":
            return None
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


_EXTREMES = {"argmax": topi.argmax, "argmin": topi.argmin}
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
