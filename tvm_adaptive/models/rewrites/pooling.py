"""Maxima of windows that reach beyond the border of an image, without padding.

A maximum does not change when a number counts twice. So a place beyond the border reads the
nearest place of the image, which is in the same window. As TVM lowers it, each load compares its
place with the border, in a branch.
"""

from __future__ import annotations

from typing import Any

from tvm_adaptive._tvm import te
from tvm_adaptive.models.network import known_extents
from tvm_adaptive.models.rewrites.whole_tiles import Legalization

# With channels first, vectors run along places, whose loads would not be contiguous.
_LAYOUT = "NHWC"


def pooling_legalizations() -> dict[str, Legalization]:
    """Return legalizations for ``relax.transform.LegalizeOps``, for processors."""
    return {"relax.nn.max_pool2d": _max_pool}


def _max_pool(builder: Any, call: Any) -> Any | None:
    """Lower maxima of windows that reach beyond the border, with channels last."""
    (x,) = call.args
    attrs, extents, places = call.attrs, known_extents(x), known_extents(call)[1:-1]
    if not (extents and places and attrs.layout == attrs.out_layout == _LAYOUT):
        return None
    window, strides, dilation, padding = (
        [int(n) for n in each]
        for each in (attrs.pool_size, attrs.strides, attrs.dilation, attrs.padding)
    )
    begins, images = padding[:2], extents[1:-1]
    last = [
        (n - 1) * step - before for n, step, before in zip(places, strides, begins, strict=True)
    ]
    ends = [place + n for place, n in zip(last, window, strict=True)]
    is_inside = not any(begins) and all(n <= m for n, m in zip(ends, images, strict=True))
    # The nearest place of the image is in the window if any is, and none is left out between.
    has_place = all(before < n for before, n in zip(begins, window, strict=True)) and all(
        place < n for place, n in zip(last, images, strict=True)
    )
    if is_inside or not has_place or dilation != [1, 1]:
        return None

    def compute(data: Any) -> Any:
        taps = [te.reduce_axis((0, n), name="r") for n in window]

        def element(image: Any, *indices: Any) -> Any:
            *outer, channel = indices
            inner = [
                _within(place * step + tap - before, n, before > 0, end > n)
                for place, step, tap, before, end, n in zip(
                    outer, strides, taps, begins, ends, images, strict=True
                )
            ]
            at = (image, *inner, channel)
            return te.max(data[at], axis=taps)

        shape = (extents[0], *places, extents[-1])
        return te.compute(shape, element, name="pool_max")

    return builder.call_te(compute, x, primfunc_name_hint="max_pool2d")


def _within(place: Any, n: int, may_be_before: bool, may_be_after: bool) -> Any:
    """Return the place of an image nearest to another one."""
    place = te.max(place, 0) if may_be_before else place
    return te.min(place, n - 1) if may_be_after else place
