"""Normalisations of groups and of images whose variance is exact beside a large mean.

TVM subtracts the squared mean from the mean of squares, in one pass: of numbers around 1,000
with a deviation of 1, in float32, nothing is left of the variance, which may become negative.
Here the squared distances from the mean are added, in a second pass. On CPUs, shapes that suit
vectors have functions of their own (``row_functions.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import te, tirx
from tvm_adaptive.models.network import known_extents
from tvm_adaptive.models.rewrites.whole_tiles import Legalization


def normalization_legalizations() -> dict[str, Legalization]:
    """Return legalizations for ``relax.transform.LegalizeOps``, for any target."""
    return {"relax.nn.group_norm": _group_norm, "relax.nn.instance_norm": _instance_norm}


def _group_norm(builder: Any, call: Any) -> Any | None:
    return _lowered(builder, call, int(call.attrs.num_groups))


def _instance_norm(builder: Any, call: Any) -> Any | None:
    """Lower a normalisation of each channel of an image: of groups of one channel."""
    return _lowered(builder, call, None)


def _lowered(builder: Any, call: Any, n_groups: int | None) -> Any | None:
    x, attrs, extents = call.args[0], call.attrs, known_extents(call.args[0])
    if not extents or not (attrs.center and attrs.scale):
        return None
    channels = int(attrs.channel_axis) % len(extents)
    compute = functools.partial(
        _normalized,
        extents=extents,
        channels=channels,
        n_groups=n_groups or extents[channels],
        axes=sorted(int(axis) % len(extents) for axis in attrs.axes),
        epsilon=float(attrs.epsilon),
    )
    name = str(call.op.name).rpartition(".")[2]
    return builder.call_te(compute, x, *call.args[1:], primfunc_name_hint=name)


def _normalized(
    data: Any,
    scale: Any,
    shift: Any,
    *,
    extents: Sequence[int],
    channels: int,
    n_groups: int,
    axes: Sequence[int],
    epsilon: float,
) -> Any:
    n_members = extents[channels] // n_groups
    n = tirx.const(float(n_members * math.prod(extents[axis] for axis in axes)), data.dtype)
    kept = [axis for axis in range(len(extents)) if axis not in axes]

    def summed(name: str, value: Callable[[Any, Any], Any]) -> Any:
        reductions = {axis: te.reduce_axis((0, extents[axis]), name="r") for axis in axes}
        member = te.reduce_axis((0, n_members), name="member")

        def element(*group: Any) -> Any:
            places = dict(zip(kept, group, strict=True)) | reductions
            places[channels] = places[channels] * n_members + member
            at = tuple(places[axis] for axis in range(len(extents)))
            return te.sum(value(at, group), axis=[*reductions.values(), member])

        shape = [n_groups if axis == channels else extents[axis] for axis in kept]
        return te.compute(shape, element, name=name)

    total = summed("total", lambda at, _: data[at])

    def distance(at: Any, group: Any) -> Any:
        return data[at] - total[group] / n

    squares = summed("squares", lambda at, group: distance(at, group) * distance(at, group))

    def element(*at: Any) -> Any:
        group = tuple(at[axis] // n_members if axis == channels else at[axis] for axis in kept)
        deviation = te.sqrt(squares[group] / n + tirx.const(epsilon, data.dtype))
        return distance(at, group) / deviation * scale[at[channels]] + shift[at[channels]]

    return te.compute(extents, element, name="normalized")
