"""MetaSchedule's traces as JSON: ``[instructions, decisions]``.

An instruction is ``[kind, inputs, attributes, outputs]``, a decision ``[number of the
instruction, value]``. The part before ``EnterPostproc`` determines the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_END = "EnterPostproc"
# Instructions whose decisions are factors of an extent.
_TILES = ("SamplePerfectTile", "SamplePartitionedTile")
# Extents and numbers of choices have 32 bits.
_MOST_DECIDED = 2**31 - 1


def choices_of(trace: Any) -> tuple[list[Any], list[tuple[int, Any]]]:
    """Return instructions and decisions of a trace, without those of postprocessors."""
    instructions, decisions = trace
    kinds = [str(instruction[0]) for instruction in instructions]
    end = kinds.index(_END) if _END in kinds else len(kinds)
    numbered = sorted((int(number), decision) for number, decision in decisions)
    made = [(number, decision) for number, decision in numbered if number < end]
    return without_flags(instructions[:end]), made


def is_sane(trace: Any) -> bool:
    """Say whether a trace has a valid form and decisions; TVM divides by a tile of 0."""
    try:
        instructions, decisions = trace
        kinds = [kind for kind, _inputs, _attributes, _outputs in instructions]
        are_names = all(isinstance(kind, str) for kind in kinds)
        return are_names and all(_is_decided(kinds, *each) for each in decisions)
    except (TypeError, ValueError, IndexError):
        return False


def _is_decided(kinds: Sequence[str], number: Any, decision: Any) -> bool:
    """Say whether an instruction may have a decision."""
    parts = decision if isinstance(decision, list) else [decision]
    least = 1 if kinds[number] in _TILES else -_MOST_DECIDED
    return 0 <= number < len(kinds) and all(
        isinstance(part, int) and least <= part <= _MOST_DECIDED for part in parts
    )


def without_flags(value: Any) -> Any:
    """Return JSON with 0 and 1 for false and true, as in MetaSchedule's files."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, list):
        return [without_flags(each) for each in value]
    return value
