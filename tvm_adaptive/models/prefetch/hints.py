"""Give records of tuned functions hints about the weights to ask for."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tvm_adaptive._tvm import (
    IRModule,
    PrimFunc,
    RemoveWeightLayoutRewriteBlock,
    TuningRecord,
)
from tvm_adaptive.models.prefetch.reading import (
    item_bytes,
    parameter_buffers,
    shape_of,
    sites_of,
)
from tvm_adaptive.models.prefetch.rewrite import HINT, follow_hints

# As many lines as a core can wait for at a time (12 to 16 on today's x86 processors), or all
# that a visit asks for before it begins: a kernel that a compiler has found good registers
# for is best left in one piece.
LINES_AT_ONCE = (16, 1 << 16)
# Smaller weights are fetched while the first rows are computed.
_LEAST_BYTES = 256 << 10


def hinted(record: TuningRecord, weights: tuple[int, ...]) -> list[TuningRecord]:
    """Return a record in forms that ask for their weights ahead.

    Which of them is the fastest, or whether the record itself is, only timings say.

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
        count as the same candidate; empty where no weight can be asked for.
    """
    schedule = record.as_measure_candidate().sch
    readers = list(_readers(_packed(schedule.mod), weights))
    forms = []
    for lines in LINES_AT_ONCE if readers else ():
        form = schedule.copy()
        for function, block, number in readers:
            form.annotate(form.get_sblock(block, func_name=function), HINT, f"{number}:{lines}")
        forms.append(form)
    return [
        TuningRecord(form.trace, record.workload, record.run_secs, record.target, record.args_info)
        for form in forms
        if _can_be_followed(form.mod)
    ]


def _can_be_followed(mod: IRModule) -> bool:
    packed = _packed(mod)
    return follow_hints(packed) is not packed


def _packed(mod: IRModule) -> IRModule:
    """Return a module that takes its weights in the layout that its schedule wants."""
    return RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(mod)


def _readers(mod: IRModule, weights: tuple[int, ...]) -> Iterator[tuple[str, str, int]]:
    """Yield (function, block, weight's number) of blocks that sum over a large weight."""
    for variable, function in mod.functions.items():
        if not isinstance(function, PrimFunc):
            continue
        buffers = parameter_buffers(function)
        large = [
            number
            for number in weights
            if buffers[number] is not None
            and math.prod(shape_of(buffers[number])) * item_bytes(buffers[number]) >= _LEAST_BYTES
        ]
        for site in sites_of(function):
            read = [number for number in large if site.summed() and site.index_of(buffers[number])]
            if read:
                yield str(variable.name_hint), str(site.block.name_hint), read[0]
