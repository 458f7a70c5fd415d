"""What a GPU can hold, as limits of a sketch's decisions.

MetaSchedule draws tilings for GPUs at random and drops those with too many or too few threads in
a block, or too much shared memory: of a convolution of ResNet-18, 99 of 100. Such a program is
made and verified before it is dropped; the limits say the same of its decisions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tvm_adaptive._tvm import IRModule, Schedule, ScheduleError, Target, Trace, buffer_of, handle
from tvm_adaptive._tvm.operands import stepped_in
from tvm_adaptive.search_strategy.knobs import Dimension, Extent, Limit
from tvm_adaptive.values.agreement import item_bytes

_SHARED = "shared"
_THREAD = "threadIdx.x"
_IN_BLOCK = (_THREAD, "vthread.x")  # loops within a block of threads
_LEAST_THREADS = "meta_schedule.thread_extent_low_inclusive"
_MOST_THREADS = "meta_schedule.thread_extent_high_inclusive"


def limits_of(
    trace: Trace, tiles: Sequence[tuple[Any, int]], mod: IRModule, target: Target
) -> list[Limit]:
    """Return what every valid program of a sketch keeps to; some programs that do are invalid.

    ``tiles`` are the instructions of a trace that sample a tile, with its place in a vector.
    """
    tiling = _Tiling()
    place_of = {
        handle(part): start + i for inst, start in tiles for i, part in enumerate(inst.outputs)
    }
    for inst in trace.insts:
        tiling.read(inst, place_of)
    limits = []
    for loop in tiling.bound.get(_THREAD, []):
        places = tiling.places.get(loop)
        most = int(target.attrs.get("max_threads_per_block", tiling.most_threads))
        if places:
            most = min(most, tiling.most_threads)
            limits.append(Limit((((places,),),), tiling.least_threads, most))
    shared_bytes = target.attrs.get("max_shared_memory_per_block")
    if shared_bytes is not None and (limit := _shared_limit(tiling, mod, int(shared_bytes))):
        limits.append(limit)
    return limits


@dataclasses.dataclass
class _Tiling:
    """How a trace splits, binds and caches; loops and blocks by their handles."""

    places: dict[int, Extent] = dataclasses.field(default_factory=dict)  # of split loops' extents
    parts: dict[int, list[int]] = dataclasses.field(default_factory=dict)  # of a loop
    loops: dict[int, list[int]] = dataclasses.field(default_factory=dict)  # of a block
    names: dict[int, str] = dataclasses.field(default_factory=dict)  # of blocks
    fused: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    bound: dict[str, list[int]] = dataclasses.field(default_factory=dict)  # by thread axis
    order: list[int] = dataclasses.field(default_factory=list)  # of split loops, outermost first
    # Of shared copies: block that reads, number of the operand, and the loop that makes them.
    copies: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    made_at: dict[int, int] = dataclasses.field(default_factory=dict)
    least_threads: int = 1
    most_threads: int = 1 << 31

    def read(self, inst: Any, place_of: Mapping[int, int]) -> None:
        """Note what an instruction does."""
        kind, attrs = str(inst.kind.name), [str(each) for each in inst.attrs or ()]
        inputs, outputs = list(inst.inputs), [handle(each) for each in inst.outputs]
        if kind == "Split":
            self._split(handle(inputs[0]), outputs, [_place(each, place_of) for each in inputs[1:]])
        elif kind == "Fuse":
            self._fuse(outputs[0], [handle(each) for each in inputs])
        elif kind == "Annotate":
            self._annotate(attrs[0], inputs[1])
        elif kind == "GetSBlock":
            self.names[outputs[0]] = attrs[0]
        elif kind == "GetLoops":
            self.loops.setdefault(handle(inputs[0]), outputs)
        elif kind == "Reorder":
            self.order = self.order or [handle(each) for each in inputs]
        elif kind == "Bind":
            self.bound.setdefault(attrs[0], []).append(handle(inputs[0]))
        elif kind == "CacheRead" and attrs[1] == _SHARED:
            self.copies[outputs[0]] = handle(inputs[0]), int(inst.attrs[0])
        elif kind == "ComputeAt":
            self.made_at[handle(inputs[0])] = handle(inputs[1])

    def _split(self, loop: int, parts: list[int], places: Sequence[int | None]) -> None:
        self.parts[loop] = parts
        pairs = zip(parts, places, strict=True)
        self.places.update((part, (place,)) for part, place in pairs if place is not None)

    def _fuse(self, loop: int, merged: list[int]) -> None:
        self.fused[loop] = merged
        if all(each in self.places for each in merged):
            self.places[loop] = tuple(place for each in merged for place in self.places[each])

    def _annotate(self, key: str, value: Any) -> None:
        if key == _LEAST_THREADS:
            self.least_threads = int(value)
        elif key == _MOST_THREADS:
            self.most_threads = int(value)

    def inner_places(self, loop: int, made_at: int) -> Extent:
        """Return the places of a loop's parts over which one copy at a loop extends."""
        in_block = {
            each
            for axis in _IN_BLOCK
            for fused in self.bound.get(axis, [])
            for each in self.fused.get(fused, [fused])
        }
        first = self.order.index(made_at) if made_at in self.order else len(self.order)
        inside = {*self.order[first + 1 :], *in_block}
        parts = [part for part in self.parts.get(loop, []) if part in inside]
        return tuple(place for part in parts for place in self.places.get(part, ()))


def _shared_limit(tiling: _Tiling, mod: IRModule, shared_bytes: int) -> Limit | None:
    """Return the limit of all copies in shared memory together; None without copies."""
    sizes: list[tuple[Dimension, ...]] = []
    least_bytes = 1 << 31
    schedule = Schedule(mod)
    for copy, (reader, number) in tiling.copies.items():
        name = tiling.names.get(reader)
        made_at = tiling.made_at.get(copy)
        if name is None or made_at is None:
            continue
        try:
            block = schedule.get(schedule.get_sblock(name))
        except ScheduleError:  # the sketch has made it
            continue
        loops = tiling.loops.get(reader, [])
        if number >= len(block.reads) or len(loops) != len(block.iter_vars):
            continue
        region = block.reads[number]
        inner = {
            handle(axis.var): tiling.inner_places(loop, made_at)
            for axis, loop in zip(block.iter_vars, loops, strict=True)
        }
        sizes.append(_least_size(region, inner))
        least_bytes = min(least_bytes, item_bytes(str(buffer_of(region).dtype)))
    return Limit(tuple(sizes), 0, shared_bytes // least_bytes) if sizes else None


def _least_size(region: Any, inner: Mapping[int, Extent]) -> tuple[Dimension, ...]:
    """Return dimensions that a copy of a region has at least: each step is another element."""
    found = []
    for index in region.region:
        axes = [handle(axis) for axis in stepped_in(index.min)]
        found.append(tuple(inner[axis] for axis in axes if axis in inner))
    return tuple(dimension for dimension in found if dimension)


def _place(factor: Any, place_of: Mapping[int, int]) -> int | None:
    """Return the place in a vector of a split's factor; None for a plain number, or none."""
    return None if factor is None or isinstance(factor, int) else place_of.get(handle(factor))
