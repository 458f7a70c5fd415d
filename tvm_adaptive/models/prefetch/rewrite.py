"""Give records of tuned functions hints about their weights, and follow the hints."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import (
    For,
    ForKind,
    IRModule,
    PrimFunc,
    SBlockRealize,
    Schedule,
    SeqStmt,
    Var,
)
from tvm_adaptive._tvm.tensor_functions import buffer_shape
from tvm_adaptive.models.prefetch import reading as panels
from tvm_adaptive.models.prefetch.reading import Bursts, Reading, Visits, integer

logger = logging.getLogger(__name__)

# Annotation of a block, such as "1:16": which parameter is the weight, and how many lines to
# prefetch at once. It is part of a schedule's trace, so databases keep it, and the name stays;
# other compilers ignore it.
HINT = "tvm_adaptive.prefetch"
# As many lines as a core can wait for at a time (12 to 16 on today's x86 processors), or all
# lines of a visit before it begins: some kernels are compiled best in one piece.
LINES_AT_ONCE = (16, 1 << 16)

# Smaller weights are loaded while the first rows are computed.
_MIN_WEIGHT_BYTES = 256 << 10
_LINE_BYTES = 64  # of every x86 and most ARM processors; elsewhere some prefetches are useless
# Two groups must fit into a core's own cache, one or two MiB today; by the time the next one
# is loaded, most of the present one is not needed any more.
_MAX_GROUP_BYTES = 1 << 20
# More prefetches in a row are a loop: unrolled they would evict the kernel from the first cache.
_MAX_UNROLLED = 32
# A period is as long as there are tiles of rows; a thousand is a lot.
_MAX_STEPS = 4096
# LLVM's arguments: to be read, worth keeping in the second cache, data.
_TO_READ, _SECOND_CACHE, _DATA = 0, 2, 1


def hinted(record: _tvm.TuningRecord, weights: tuple[int, ...]) -> list[_tvm.TuningRecord]:
    """Return variants of a record that prefetch their weights.

    Only timings can show which is the fastest, one of them or the record itself.

    Parameters
    ----------
    record : TuningRecord
        Of one function, for a CPU.
    weights : tuple of int
        Which of its parameters are the same at every inference.

    Returns
    -------
    list of TuningRecord
        With the hint in their traces, after all that a search can choose, so that they
        count as the same candidate; empty where no weight can be prefetched.
    """
    return [
        _tvm.TuningRecord(
            variant.trace, record.workload, record.run_secs, record.target, record.args_info
        )
        for variant in hinted_schedules(record.as_measure_candidate().sch, weights)
    ]


def hinted_schedules(schedule: Schedule, weights: tuple[int, ...]) -> list[Schedule]:
    """Return variants of a schedule that prefetch its weights; see :func:`hinted`."""
    readers = list(_readers(_packed(schedule.mod), weights))
    variants = []
    for lines in LINES_AT_ONCE if readers else ():
        variant = schedule.copy()
        for function, block, number in readers:
            found = variant.get_sblock(block, func_name=function)
            variant.annotate(found, HINT, f"{number}:{lines}")
        packed = _packed(variant.mod)
        if follow_hints(packed) is not packed:
            variants.append(variant)
    return variants


def follow_hints(mod: IRModule) -> IRModule:
    """Return a module of scheduled functions that prefetch their weights as hinted.

    For CPUs. Call it before the module is built, and after weights have got their layouts.

    Parameters
    ----------
    mod : IRModule
        A hint that cannot be followed (the weight is no parameter, or is not read in
        panels) is ignored.

    Returns
    -------
    IRModule
        ``mod`` itself if there was nothing to do.
    """
    changed: dict[Any, Any] = {}
    for variable, function in mod.functions.items():
        if not isinstance(function, PrimFunc):
            continue
        try:
            prefetches = _prefetches_of(function)
            if prefetches:
                changed[variable] = function.with_body(_rewritten(function.body, prefetches))
        except Exception:  # a hint is worth a tenth at best, and never a failure
            logger.warning("%s: its hints are not followed", variable, exc_info=True)
    return IRModule({**dict(mod.functions.items()), **changed}, attrs=mod.attrs) if changed else mod


def _packed(mod: IRModule) -> IRModule:
    """Return a module that takes its weights in the layout that its schedule wants."""
    return _tvm.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(mod)


def _readers(mod: IRModule, weights: tuple[int, ...]) -> Iterator[tuple[str, str, int]]:
    """Yield (function, block, weight's number) of blocks that reduce over a large weight."""
    for variable, function in mod.functions.items():
        if not isinstance(function, PrimFunc):
            continue
        buffers = panels.parameter_buffers(function)
        large = [
            number
            for number in weights
            if buffers[number] is not None
            and math.prod(buffer_shape(buffers[number])) * panels.item_bytes(buffers[number])
            >= _MIN_WEIGHT_BYTES
        ]
        for site in panels.sites_of(function):
            if not site.reduction_axes():
                continue
            read = [number for number in large if site.index_of(buffers[number])]
            if read:
                yield str(variable.name_hint), str(site.block.name_hint), read[0]


@dataclasses.dataclass(frozen=True)
class _Prefetch:
    """What a loop prefetches while it runs."""

    buffer: Any  # the weight
    reading: Reading  # how it is read
    visits: Visits  # in which order, and so what comes next
    bursts: Bursts  # how what comes next is spread over the loop

    @property
    def loop(self) -> Any:
        """The loop that prefetches."""
        return self._reduction[-1]

    def added_to(self, loop: Any) -> Any:
        """Return a statement that does what a loop does, and prefetches."""
        part = Var("part", panels.dtype_of(loop.loop_var))
        length = int(loop.extent) // self.bursts.n_parts
        rest = _loop(loop, loop.body, part * length, length)
        body = SeqStmt([self._burst(part), rest])
        return For(part, integer(part, 0), integer(part, self.bursts.n_parts), ForKind.SERIAL, body)

    @property
    def _reduction(self) -> list[Any]:
        """The reduction loops down to the one that prefetches."""
        return [self.reading.loops[i] for i in self.reading.reduction[: self.bursts.loop + 1]]

    def _burst(self, part: Any) -> Any:
        visits, bursts = self.visits, self.bursts
        outer = [self.reading.loops[i] for i in self.reading.outer]
        step = _linear([(loop.loop_var, int(loop.extent)) for loop in outer])
        rounds = [(loop.loop_var, int(loop.extent)) for loop in self._reduction[:-1]]
        burst = _linear([*rounds, (part, bursts.n_parts)])
        visit = step % visits.period // visits.n_panels
        ahead = step + visits.period - visit * visits.n_panels  # the same panel, next group
        line = Var("line", panels.dtype_of(part))
        lines = (visit * bursts.n_bursts + burst) * bursts.n_lines + line
        place = self._offset(ahead) + lines * (_LINE_BYTES // panels.item_bytes(self.buffer))
        kind = ForKind.UNROLLED if bursts.n_lines <= _MAX_UNROLLED else ForKind.SERIAL
        zero = _tvm.IntImm(panels.dtype_of(place), 0)
        indices = [zero] * (len(self.reading.shape) - 1) + [place]
        address = _tvm.address_of(_tvm.BufferLoad(self.buffer, indices))
        numbers = [_tvm.IntImm("int32", each) for each in (_TO_READ, _SECOND_CACHE, _DATA)]
        body = _tvm.Evaluate(_tvm.call_intrin("void", "tirx.prefetch", address, *numbers))
        return For(line, integer(part, 0), integer(part, bursts.n_lines), kind, body)

    def _offset(self, step: Any) -> Any:
        """Return where the panel of a step begins, in elements."""
        variables = [loop.loop_var for loop in self.reading.loops]
        values = [integer(variable, 0) for variable in variables]
        for i in self.reading.outer[:0:-1]:
            values[i] = step % self.reading.extents[i]
            step = step // self.reading.extents[i]
        values[0] = step
        places = panels.substitute(self.reading.index, tuple(zip(variables, values, strict=True)))
        return _linear(list(zip(places, self.reading.shape, strict=True)))


def _prefetches_of(function: PrimFunc) -> dict[int, _Prefetch]:
    """Return the prefetches that a function's hints request, by their loops."""
    prefetches = {}
    for site in panels.sites_of(function):
        hint = site.block.annotations.get(HINT)
        if hint is None:
            continue
        number, at_once = (int(part) for part in str(hint).split(":"))
        buffer = panels.parameter_buffers(function)[number]
        reading = panels.reading_of(site, buffer)
        prefetch = None if reading is None else _prefetch_of(reading, buffer, at_once)
        if prefetch is not None:
            prefetches[_tvm.handle(prefetch.loop.loop_var)] = prefetch
    return prefetches


def _prefetch_of(reading: Reading, buffer: Any, at_once: int) -> _Prefetch | None:
    """Return what to prefetch, None where that would not help."""
    steps = range(min(reading.n_steps, _MAX_STEPS))
    visits = panels.visits_of(reading.offset_at(step) for step in steps)
    n_bytes = reading.n_elements * panels.item_bytes(buffer)
    if visits is None or visits.n_panels * n_bytes > _MAX_GROUP_BYTES:
        return None
    extents = [reading.extents[i] for i in reading.reduction]
    bursts = panels.bursts_of(extents, math.ceil(n_bytes / _LINE_BYTES), visits.n_visits, at_once)
    prefetch = _Prefetch(buffer, reading, visits, bursts)
    return prefetch if int(prefetch.loop.kind) == int(ForKind.SERIAL) else None


def _rewritten(statement: Any, prefetches: dict[int, _Prefetch]) -> Any:
    if isinstance(statement, For):
        loop = _loop(statement, _rewritten(statement.body, prefetches))
        prefetch = prefetches.get(_tvm.handle(statement.loop_var))
        return loop if prefetch is None else prefetch.added_to(loop)
    if isinstance(statement, SeqStmt):
        return SeqStmt([_rewritten(each, prefetches) for each in statement.seq])
    if isinstance(statement, SBlockRealize):
        block = statement.block
        rewritten = _tvm.SBlock(
            block.iter_vars,
            block.reads,
            block.writes,
            block.name_hint,
            _rewritten(block.body, prefetches),
            block.init,
            block.alloc_buffers,
            block.match_buffers,
            block.annotations,
        )
        return SBlockRealize(statement.iter_values, statement.predicate, rewritten)
    return statement


def _loop(loop: Any, body: Any, minimum: Any = None, extent: int | None = None) -> Any:
    return For(
        loop.loop_var,
        loop.min if minimum is None else minimum,
        loop.extent if extent is None else integer(loop.loop_var, extent),
        loop.kind,
        body,
        loop.thread_binding,
        loop.annotations,
    )


def _linear(places: Sequence[tuple[Any, int]]) -> Any:
    """Return the linear index, given (index, extent) per dimension."""
    (number, _), *others = places
    for place, extent in others:
        number = number * extent + place
    return number
