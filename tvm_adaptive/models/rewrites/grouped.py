"""Convolutions in groups of several channels, with an axis of their own for the groups.

TVM computes all filters in one axis, and each finds its group's inputs by a division, which most
schedules compute number by number. With an axis of groups, which is a batch of smaller
convolutions, the filters of a group have their inputs in common. On two cores of a Zen 3, first
draft and best of some ten: the positional convolution of wav2vec2 (16 groups of 48 channels, 128
taps, 49 places) 7.5 and 6.7 ms, as TVM lowers it 136 and 6.3 ms, with channels first 29 and 23 ms;
32 groups of 4 channels, 3 x 3 at 56 x 56 places, 1.8 and 1.3 ms, as TVM lowers it 7.7 and 4.5 ms.
"""

from __future__ import annotations

import functools
from typing import Any

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import Constant, relax, te, topi
from tvm_adaptive._tvm.vector_unit import VectorUnit
from tvm_adaptive.models.network import are_float32, known_extents, layouts_of
from tvm_adaptive.models.rewrites.whole_tiles import Legalization, whole_rows

_LAYOUTS = (["NWC", "WIO", "NWC"], ["NHWC", "HWIO", "NHWC"])


def grouped_legalizations(unit: VectorUnit) -> dict[str, Legalization]:
    """Return legalizations for ``relax.transform.LegalizeOps``, for processors."""
    lower = functools.partial(_grouped, unit)
    return {"relax.nn.conv1d": lower, "relax.nn.conv2d": lower}


def is_grouped(call: Any) -> bool:
    """Say whether a convolution of float32 has groups of several channels, and constant weights."""
    data, kernel = call.args
    n_groups = int(call.attrs.groups)
    if n_groups == 1 or not (isinstance(kernel, Constant) and are_float32(data, kernel, call)):
        return False
    axis = str(call.attrs.kernel_layout).index("I")
    return known_extents(kernel)[axis] > 1


def _grouped(unit: VectorUnit, builder: Any, call: Any) -> Any | None:
    """Lower a convolution in groups, with channels last."""
    data, kernel = call.args
    attrs, extents, layouts = call.attrs, known_extents(call), layouts_of(call)
    if not (layouts in _LAYOUTS and extents and is_grouped(call)):
        return None
    n_groups, places = int(attrs.groups), extents[1:-1]
    *window, n_inputs, n_filters = known_extents(kernel)
    n_own = n_filters // n_groups
    values = _tvm.data_of_constant(kernel).numpy().reshape((*window, n_inputs, n_groups, n_own))
    strides, dilation = ([int(n) for n in each] for each in (attrs.strides, attrs.dilation))
    padding = [int(n) for n in attrs.padding]
    before, after = padding[: len(places)], padding[len(places) :]
    # Two axes of places have tiles of several places of each.
    wide = [whole_rows(n, unit) for n in places] if len(places) == 1 else places

    def compute(x: Any, weight: Any) -> Any:
        if any(padding):
            x = topi.nn.pad(x, [0, *before, 0], [0, *after, 0], name="pad_temp")
        taps = [te.reduce_axis((0, n), name="r") for n in window]
        channel = te.reduce_axis((0, n_inputs), name="rc")

        def element(image: Any, *indices: Any) -> Any:
            *outer, group, filter_ = indices
            inner = [
                (te.min(place, n - 1) if n < m else place) * stride + tap * step
                for place, n, m, stride, tap, step in zip(
                    outer, places, wide, strides, taps, dilation, strict=True
                )
            ]
            of_data = (image, *inner, group * n_inputs + channel)
            of_weight = (*taps, channel, group, filter_)
            return te.sum(x[of_data] * weight[of_weight], axis=[*taps, channel])

        shape = (extents[0], *wide, n_groups, n_own)
        layout = layouts[0].lower()
        result = te.compute(shape, element, name=f"group_conv{len(places)}d_{layout}")

        def channels(*indices: Any) -> Any:
            *outer, channel = indices
            of_result = (*outer, channel // n_own, channel % n_own)
            return result[of_result]

        return te.compute(extents, channels, name="channels")

    weight = relax.const(_tvm.tensor(values))
    return builder.call_te(compute, data, weight, primfunc_name_hint=f"group_conv{len(places)}d")
