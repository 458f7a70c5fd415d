"""From points in the space of knobs to schedules and back."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import (
    ForKind,
    IRModule,
    Schedule,
    Trace,
    TuneContext,
    args_info_of,
    buffer_of,
    bytes_of,
    is_gpu,
)
from tvm_adaptive._tvm.operands import batch_axes, reads_windows, shares_operands
from tvm_adaptive._tvm.tensor_functions import weights_of
from tvm_adaptive._tvm.vector_unit import vector_unit_of
from tvm_adaptive.models.prefetch import hinted_schedules
from tvm_adaptive.search_strategy.analytical import analytical_points
from tvm_adaptive.search_strategy.gpu_limits import limits_of
from tvm_adaptive.search_strategy.knobs import (
    OPEN,
    Knob,
    KnobSpace,
    Limit,
    Point,
    Tile,
    Undrawn,
    knob_of,
    sketch_name,
    slices_of,
)
from tvm_adaptive.search_strategy.schedules import copies_of, in_threads, knobs_of
from tvm_adaptive.search_strategy.tilings import Processor
from tvm_adaptive.values.trace_json import without_flags

logger = logging.getLogger(__name__)

# Of weights from 2.4 MB on, a variant that prefetches them took 0.77 to 0.94 of the time, of 0.3 to
# 1.2 MB 0.94 to 1.10 (thirteen functions of ResNet-18 and DistilBERT). Where they are used once, in
# products with a vector, 1.17.
_FAR_BYTES = 2 << 20
_32_BITS = "32"  # the end of the names of their types
_VECTORIZES = "RewriteParallelVectorizeUnroll"  # MetaSchedule's postprocessor
# Seeds of TVM's schedules are in [1, 2^31).
_SEEDS = 2**31 - 1


class Sketches:
    """The design spaces of a task, with their decisions left open."""

    def __init__(self, context: TuneContext, design_spaces: Sequence[Schedule]) -> None:
        self._traces = [space.trace.simplified(True) for space in design_spaces]
        self._decided = [[i for i in t.insts if i in t.decisions] for t in self._traces]
        self._postprocs = list(context.space_generator.postprocs or ())
        self._context = context
        is_llvm = context.target.kind.name == "llvm"
        self._lanes = vector_unit_of(context.target).lanes if is_llvm else 0
        kinds = [{str(inst.kind.name) for inst in trace.insts} for trace in self._traces]
        self._is_fused = ["ReverseComputeAt" in each for each in kinds]
        names = [_name_of(trace) for trace in self._traces]
        self._by_name = {name: i for i, name in enumerate(names)}
        knobs = [
            [knob_of(str(inst.kind.name), inst.attrs, trace.decisions[inst]) for inst in decided]
            for trace, decided in zip(self._traces, self._decided, strict=True)
        ]
        self.space = KnobSpace(knobs, names, self._limits(knobs) if is_gpu(context.target) else ())

    def promising(self, processor: Processor, n: int, rng: np.random.Generator) -> list[Point]:
        """Return up to ``n`` points that suit a processor, the most promising first."""
        mod = self._context.mod
        is_shared = shares_operands(mod)
        return analytical_points(
            self.space,
            processor,
            n,
            rng,
            shares_operands=is_shared,
            reads_windows=reads_windows(mod),
            is_batch=batch_axes(mod) if is_shared else (),
            is_fused=self._is_fused,
        )

    def replay(
        self, points: Sequence[Point], rng: np.random.Generator
    ) -> list[tuple[Point, Schedule] | None]:
        """Make the programs of points: apply their decisions, then the postprocessors."""
        seeded = list(zip(points, rng.integers(1, _SEEDS, len(points)).tolist(), strict=True))
        # One point needs no copies, which take as long as its program.
        mods = self._mods if len(seeded) > 1 else [self._context.mod]
        return in_threads(self._replay, mods, seeded)

    def prefetching(self, schedule: Schedule) -> list[Schedule]:
        """Return variants of a program that prefetch its weights; none where these are small."""
        return hinted_schedules(schedule, weights_of(self._context.mod))

    @functools.cached_property
    def has_far_weights(self) -> bool:
        """Whether results share weights that lie beyond a core's own cache."""
        mod = self._context.mod
        infos = args_info_of(mod)
        n_bytes = sum(bytes_of(infos[i]) for i in weights_of(mod))
        return n_bytes >= _FAR_BYTES and shares_operands(mod)

    def point_of(self, schedule: Schedule) -> Point | None:
        """Return the point of a schedule, e.g. of a database; None for one of another sketch."""
        sketch = self._by_name.get(_name_of(schedule.trace))
        return None if sketch is None else self._point(sketch, schedule)

    @functools.cached_property
    def _mods(self) -> list[IRModule]:
        """One copy of the task for each thread, made when a task of many has its first slot."""
        return copies_of(self._context.mod, max(1, int(self._context.num_threads)))

    def _limits(self, knobs: Sequence[Sequence[Knob]]) -> list[list[Limit]]:
        """Return what a GPU can hold of each sketch."""
        mod, target = self._context.mod, self._context.target
        found = []
        for trace, decided, own in zip(self._traces, self._decided, knobs, strict=True):
            places = zip(decided, own, slices_of(own), strict=True)
            tiles = [(inst, at.start) for inst, knob, at in places if isinstance(knob, Tile)]
            found.append(limits_of(trace, tiles, mod, target))
        return found

    def _replay(self, mod: Any, seeded: tuple[Point, int]) -> tuple[Point, Schedule] | None:
        point, seed = seeded
        schedule = Schedule(mod, seed=seed, error_render_level="none")
        trace = Trace(self._traces[point.sketch].insts, self._decisions(point))
        try:
            trace.apply_to_schedule(schedule, remove_postproc=True)
            schedule.enter_postproc()
            for postproc in self._postprocs:
                if not postproc.apply(schedule):
                    return None
                # Once sums have blocks of their own for the initial zeros, no loop of theirs can
                # be a vector any more.
                if self._lanes and type(postproc).__name__ == _VECTORIZES:
                    split_uneven_vectors(schedule, self._lanes)
        except Exception:
            logger.debug("a point of the space leads to no valid schedule", exc_info=True)
            return None
        return self._point(point.sketch, schedule), schedule

    def _decisions(self, point: Point) -> dict[Any, Any]:
        decisions: dict[Any, Any] = {}
        knobs = self.space.sketches[point.sketch]
        places = zip(self._decided[point.sketch], knobs, slices_of(knobs), strict=True)
        for inst, knob, where in places:
            part = point.vector[where]
            if not (OPEN in part and isinstance(knob, Undrawn)):
                decisions[inst] = list(part) if knob.width > 1 else part[0]
        return decisions

    def _point(self, sketch: int, schedule: Schedule) -> Point:
        n_knobs = len(self._decided[sketch])
        decisions = knobs_of(schedule)[:n_knobs]
        return Point(sketch, tuple(value for part in decisions for value in part))


def _name_of(trace: Any) -> str:
    instructions, _ = trace.as_json(remove_postproc=True)
    # Numbers are constants of TVM here, and plain ones in a trace that came from a file.
    text = json.dumps(instructions, default=lambda constant: constant.value)
    return sketch_name(without_flags(json.loads(text)))


def split_uneven_vectors(schedule: Schedule, lanes: int) -> None:
    """Make loops over registers of vectors of 32-bit numbers that fill several of them.

    MetaSchedule makes vectors of any length. LLVM widens those of 24 or 40 numbers to 32 or 64,
    takes them apart at each step, and keeps sums that are collected as such a vector in memory.
    On two cores of a Zen 3, a product of 120 x 512 x 1920 in tiles of 4 x 24 numbers took 9.9 ms,
    of 4 rows of three registers 1.57, of 6 x 16 numbers 1.54. If the number of registers is a power
    of two, LLVM divides vectors as well. The loops are written out, and stand in the trace after
    all that a search can choose, so that whoever compiles a record gets them.
    """
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        for loop in schedule.get_loops(block)[-1:]:
            if _is_uneven(schedule.get(loop), lanes) and _is_of_32_bits(schedule.get(block)):
                registers, numbers = schedule.split(loop, [None, lanes])
                schedule.unroll(registers)
                schedule.vectorize(numbers)


def _is_uneven(loop: Any, lanes: int) -> bool:
    if int(loop.kind) != int(ForKind.VECTORIZED):
        return False
    n_registers, rest = divmod(int(loop.extent), lanes)
    return rest == 0 and n_registers & (n_registers - 1) != 0


def _is_of_32_bits(block: Any) -> bool:
    dtypes = [str(buffer_of(each).ty.dtype) for each in block.writes]
    return all(dtype.endswith(_32_BITS) for dtype in dtypes)
