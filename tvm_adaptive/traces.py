"""MetaSchedule's traces as JSON, ``[instructions, decisions]``. Pure.

An instruction is ``[kind, inputs, attributes, outputs]``, a decision ``[number of the
instruction, what was decided]``. What comes after ``EnterPostproc`` follows from what is
before.
"""

from __future__ import annotations

from typing import Any

_END = "EnterPostproc"


def choices_of(trace: Any) -> tuple[list[Any], list[tuple[int, Any]]]:
    """Return instructions and decisions of a trace, without those of postprocessors.

    Parameters
    ----------
    trace : list
        JSON, parsed; of a file or of a trace in memory, which write flags differently.

    Returns
    -------
    instructions : list
    decisions : list of (int, object)
        By the number of their instruction.

    Raises
    ------
    TypeError, ValueError, IndexError, KeyError
        When it is no trace.
    """
    instructions, decisions = trace
    kinds = [str(instruction[0]) for instruction in instructions]
    end = kinds.index(_END) if _END in kinds else len(kinds)
    numbered = sorted((int(number), decision) for number, decision in decisions)
    made = [(number, decision) for number, decision in numbered if number < end]
    return without_flags(instructions[:end]), made


def without_flags(value: Any) -> Any:
    """Return JSON with 0 and 1 for false and true, as MetaSchedule's files have it."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, list):
        return [without_flags(each) for each in value]
    return value
