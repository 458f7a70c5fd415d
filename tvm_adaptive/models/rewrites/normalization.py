"""Normalisations of groups and of images whose variance is exact beside a large mean.

TVM subtracts the squared mean from the mean of squares, in one pass: of numbers around 1,000
with a deviation of 1, in float32, nothing is left of the variance, which may become negative.
Here the squared distances from the mean are added, in a second pass. On CPUs, shapes that suit
vectors have functions of their own (``row_functions.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm_adaptive._tvm import te, tirx
from tvm_adaptive.models.network import known_extents
from tvm_adaptive.models.rewrites.whole_tiles import Legalization


def normalization_legalizations() -> dict[str, Legalization]:
    """Return legalizations for ``relax.transform.LegalizeOps``, for any target."""
    return {"relax.nn.group_norm": _group_norm, "relax.nn.instance_norm": _instance_norm}


# One by one, a million equal numbers lose a hundredth of their sum, four thousand some 1e-4.
_ADDED_AT_ONCE = 4096
# Of a group's channels, beside the axes of the data.
_MEMBER = -1


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

    # By axis; a channel's place is its group and its member of it.
    sizes = {axis: n_groups if axis == channels else extents[axis] for axis in (*kept, *axes)}
    sizes[_MEMBER] = n_members
    stages = _stages({axis: sizes[axis] for axis in (*axes, _MEMBER)})

    def summed(name: str, value: Callable[[Any, Any], Any]) -> Any:
        def first(places: Mapping[int, Any]) -> Any:
            channel = places[channels] * n_members + places[_MEMBER]
            whole = {**places, channels: channel}
            at = tuple(whole[axis] for axis in range(len(extents)))
            return value(at, tuple(places[axis] for axis in kept))

        read: Callable[[Mapping[int, Any]], Any] = first
        left = list(sizes)
        for number, stage in enumerate(stages, 1):
            left = [axis for axis in left if axis not in stage]
            is_last = number == len(stages)
            sums = _sum_of(read, sizes, left, stage, name if is_last else f"{name}_{number}")
            read = functools.partial(_element_of, sums, left)
        return sums

    total = summed("total", lambda at, _: data[at])

    def distance(at: Any, group: Any) -> Any:
        return data[at] - total[group] / n

    squares = summed("squares", lambda at, group: distance(at, group) * distance(at, group))

    def element(*at: Any) -> Any:
        group = tuple(at[axis] // n_members if axis == channels else at[axis] for axis in kept)
        deviation = te.sqrt(squares[group] / n + tirx.const(epsilon, data.dtype))
        return distance(at, group) / deviation * scale[at[channels]] + shift[at[channels]]

    return te.compute(extents, element, name="normalized")


def _stages(sizes: Mapping[int, int]) -> list[list[int]]:
    """Return which axes to sum over first, second and so on; few numbers, or one axis, in each.

    The innermost axes are first, so that numbers side by side are added.
    """
    stages: list[list[int]] = [[]]
    n = 1
    for axis in [*sorted(set(sizes) - {_MEMBER}, reverse=True), _MEMBER]:
        n *= sizes[axis]
        if stages[-1] and n > _ADDED_AT_ONCE:
            stages.append([])
            n = sizes[axis]
        stages[-1].append(axis)
    return [[axis for axis in sizes if axis in stage] for stage in stages]


def _sum_of(
    read: Callable[[Mapping[int, Any]], Any],
    sizes: Mapping[int, int],
    left: Sequence[int],
    summed: Sequence[int],
    name: str,
) -> Any:
    """Return the sums of what is read over some axes, at each place on those that are left."""
    reductions = {axis: te.reduce_axis((0, sizes[axis]), name="r") for axis in summed}

    def element(*index: Any) -> Any:
        places = dict(zip(left, index, strict=True)) | reductions
        return te.sum(read(places), axis=list(reductions.values()))

    return te.compute([sizes[axis] for axis in left], element, name=name)


def _element_of(tensor: Any, axes: Sequence[int], places: Mapping[int, Any]) -> Any:
    return tensor[tuple(places[axis] for axis in axes)]
