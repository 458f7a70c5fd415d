"""Findings out of MetaSchedule's records: which sketch, which knobs, which decisions. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from tvm_adaptive.search_strategy.knobs import Choice, Knob, Tile, Undrawn
from tvm_adaptive.search_strategy.transfer import TransferRecord
from tvm_adaptive.values.trace_json import choices_of

# TVM's extents have 32 bits in most programs, and no loop runs longer.
_MOST_EXTENT = 2**31 - 1


def transfer_record_of(record: Any, seconds: float) -> TransferRecord | None:
    """Return what a record found."""
    try:
        instructions, decisions = choices_of(record[0])
        knobs: list[Knob] = []
        vector: list[int] = []
        for number, decision in decisions:
            kind, _, attributes, _ = instructions[number]
            knob = knob_of(str(kind), attributes, decision)
            parts = as_ints(decision)
            if not _is_possible(knob, parts):
                return None
            knobs.append(knob)
            vector.extend(parts)
        name = sketch_name(instructions)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, ArithmeticError):
        return None
    return TransferRecord(name, tuple(knobs), tuple(vector), seconds)


def _is_possible(knob: Knob, decision: Sequence[int]) -> bool:
    """Say whether a decision of a record is one that its knob has."""
    if isinstance(knob, Tile):
        return min(decision) >= 1 and knob.extent <= _MOST_EXTENT
    return not isinstance(knob, Choice) or 0 <= decision[0] < len(knob.weights)


def knob_of(kind: str, attributes: Sequence[Any], decision: Any) -> Knob:
    """Return the knob that a sampling instruction is; its decision says what it splits."""
    if kind == "SamplePerfectTile":
        parts = as_ints(decision)
        return Tile(math.prod(parts), len(parts), int(attributes[1]))
    if kind == "SampleCategorical":
        weights = attributes[1]
        # TVM's constants hold their number in an attribute.
        return Choice(tuple(float(getattr(weight, "value", weight)) for weight in weights))
    return Undrawn(len(as_ints(decision)))


def sketch_name(instructions: Sequence[Any]) -> str:
    """Return a short name that sketches share exactly if their instructions are equal.

    Tasks that differ in extents only have equal instructions.
    """
    return hashlib.sha256(json.dumps(instructions).encode()).hexdigest()[:16]


def as_ints(decision: Any) -> tuple[int, ...]:
    """Flatten a decision: perfect tiles are lists, others are single numbers."""
    try:
        return tuple(int(part) for part in decision)
    except TypeError:
        return (int(decision),)
