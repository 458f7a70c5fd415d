"""Follow the hints in scheduled functions: put the instructions in that ask for weights."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from tvm_adaptive._tvm import (
    BufferLoad,
    Evaluate,
    For,
    ForKind,
    IntImm,
    IRModule,
    PrimFunc,
    SBlock,
    SBlockRealize,
    SeqStmt,
    Var,
    address_of,
    call_intrin,
    handle,
)
from tvm_adaptive.models.prefetch.panels import Bursts, Visits, bursts_of, visits_of
from tvm_adaptive.models.prefetch.reading import (
    Reading,
    dtype_of,
    integer,
    item_bytes,
    parameter_buffers,
    reading_of,
    sites_of,
    substitute,
)

logger = logging.getLogger(__name__)

# On a block, "1:16": which parameter is the weight, and how many lines to ask for at once. It
# comes from a schedule's trace, so databases keep it; a compiler that does not know it goes
# on without.
HINT = "tvm_adaptive.models.prefetch"

_LINE_BYTES = 64  # of every x86 and most ARM processors; elsewhere some requests are in vain
# Two groups must fit into what a core has for itself, one or two MiB today, and by the time
# the next one is there, most of the present one is not needed any more.
_MAX_GROUP_BYTES = 1 << 20
# More of them in a row are a loop: they would drive the kernel out of the first cache.
_MAX_UNROLLED = 32
# A period is as long as there are tiles of rows; a thousand is a lot.
_MAX_STEPS = 4096
# LLVM's arguments: to be read, worth keeping in the second cache, data.
_TO_READ, _SECOND_CACHE, _DATA = 0, 2, 1


def follow_hints(mod: IRModule) -> IRModule:
    """Return a module of scheduled functions that ask for their weights as hinted.

    For CPUs. Call it before the module is built, and after weights have got their layouts.

    Parameters
    ----------
    mod : IRModule
        A hint that cannot be followed (the weight is no parameter, or is not read in
        panels) is passed over.

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
            requests = _requests_of(function)
            if requests:
                changed[variable] = function.with_body(_rewritten(function.body, requests))
        except Exception:  # a hint is worth a tenth at best, and never a failure
            logger.warning("%s: its hints are not followed", variable, exc_info=True)
    return IRModule({**dict(mod.functions.items()), **changed}, attrs=mod.attrs) if changed else mod


@dataclasses.dataclass(frozen=True)
class _Request:
    """What a loop is to ask for while it runs."""

    buffer: Any  # the weight
    reading: Reading  # how it is read
    visits: Visits  # in which order, and so what comes next
    bursts: Bursts  # how what comes next is spread over the loop

    @property
    def loop(self) -> Any:
        """The loop that asks."""
        return self._summing[-1]

    def asking(self, loop: Any) -> Any:
        """Return a statement that does what a loop does, and asks."""
        part = Var("part", dtype_of(loop.loop_var))
        length = int(loop.extent) // self.bursts.n_parts
        rest = _loop(loop, loop.body, part * length, length)
        return For(
            part,
            integer(part, 0),
            integer(part, self.bursts.n_parts),
            ForKind.SERIAL,
            SeqStmt([self._burst(part), rest]),
        )

    @property
    def _summing(self) -> list[Any]:
        """The sum's loops down to the one that asks."""
        summing = self.reading.summing
        return [self.reading.loops[i] for i in summing[: self.bursts.loop + 1]]

    def _burst(self, part: Any) -> Any:
        visits, bursts = self.visits, self.bursts
        outer = [self.reading.loops[i] for i in self.reading.outer]
        step = _linear([(loop.loop_var, int(loop.extent)) for loop in outer])
        rounds = [(loop.loop_var, int(loop.extent)) for loop in self._summing[:-1]]
        burst = _linear([*rounds, (part, bursts.n_parts)])
        visit = step % visits.period // visits.n_panels
        ahead = step + visits.period - visit * visits.n_panels  # the same panel, next group
        line = Var("line", dtype_of(part))
        lines = (visit * bursts.n_bursts + burst) * bursts.n_lines + line
        place = self._offset(ahead) + lines * (_LINE_BYTES // item_bytes(self.buffer))
        kind = ForKind.UNROLLED if bursts.n_lines <= _MAX_UNROLLED else ForKind.SERIAL
        ask = _ask(self.buffer, len(self.reading.shape), place)
        return For(line, integer(part, 0), integer(part, bursts.n_lines), kind, ask)

    def _offset(self, step: Any) -> Any:
        """Return where the panel of a step begins, in elements."""
        variables = [loop.loop_var for loop in self.reading.loops]
        values = [integer(variable, 0) for variable in variables]
        for i in self.reading.outer[:0:-1]:
            values[i] = step % self.reading.extents[i]
            step = step // self.reading.extents[i]
        values[0] = step
        places = substitute(self.reading.index, tuple(zip(variables, values, strict=True)))
        return _linear(list(zip(places, self.reading.shape, strict=True)))


def _requests_of(function: PrimFunc) -> dict[int, _Request]:
    """Return the requests of a function, by their loops."""
    requests = {}
    for site in sites_of(function):
        hint = site.block.annotations.get(HINT)
        if hint is None:
            continue
        number, at_once = (int(part) for part in str(hint).split(":"))
        buffer = parameter_buffers(function)[number]
        reading = reading_of(site, buffer)
        request = None if reading is None else _request_of(reading, buffer, at_once)
        if request is not None:
            requests[handle(request.loop.loop_var)] = request
    return requests


def _request_of(reading: Reading, buffer: Any, at_once: int) -> _Request | None:
    """Return what to ask for, None where asking ahead would not help."""
    steps = range(min(reading.n_steps, _MAX_STEPS))
    visits = visits_of(reading.offset_at(step) for step in steps)
    n_bytes = reading.n_elements * item_bytes(buffer)
    if visits is None or visits.n_panels * n_bytes > _MAX_GROUP_BYTES:
        return None
    extents = [reading.extents[i] for i in reading.summing]
    n_lines = -(-n_bytes // _LINE_BYTES)
    bursts = bursts_of(extents, n_lines, visits.n_visits, at_once)
    request = _Request(buffer, reading, visits, bursts)
    return request if int(request.loop.kind) == int(ForKind.SERIAL) else None


def _rewritten(statement: Any, requests: dict[int, _Request]) -> Any:
    if isinstance(statement, For):
        loop = _loop(statement, _rewritten(statement.body, requests))
        request = requests.get(handle(statement.loop_var))
        return loop if request is None else request.asking(loop)
    if isinstance(statement, SeqStmt):
        return SeqStmt([_rewritten(each, requests) for each in statement.seq])
    if isinstance(statement, SBlockRealize):
        block = _block(statement.block, _rewritten(statement.block.body, requests))
        return SBlockRealize(statement.iter_values, statement.predicate, block)
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


def _block(block: Any, body: Any) -> Any:
    return SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        body,
        block.init,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )


def _linear(places: Sequence[tuple[Any, int]]) -> Any:
    """Return the number of a place, given (place, extent) per dimension."""
    (number, _), *others = places
    for place, extent in others:
        number = number * extent + place
    return number


def _ask(buffer: Any, n_dims: int, place: Any) -> Any:
    """Return the statement that asks for the line in which an element is, if there is one."""
    zero = IntImm(dtype_of(place), 0)
    address = address_of(BufferLoad(buffer, [zero] * (n_dims - 1) + [place]))
    numbers = [IntImm("int32", each) for each in (_TO_READ, _SECOND_CACHE, _DATA)]
    return Evaluate(call_intrin("void", "tirx.prefetch", address, *numbers))
