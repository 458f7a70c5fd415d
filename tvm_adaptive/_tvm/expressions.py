"""What expressions of tensor functions are made of."""

from __future__ import annotations

from typing import Any

from tvm_adaptive._tvm import tirx


def is_load(expression: Any) -> bool:
    """Say whether an expression loads from a buffer."""
    return hasattr(expression, "indices")


def parts_of(expression: Any) -> list[Any]:
    """Return the operands of an expression; of a load, the indices."""
    if is_load(expression):
        return list(expression.indices)
    if isinstance(expression, tirx.Select):
        return [expression.condition, expression.true_value, expression.false_value]
    if hasattr(expression, "args"):
        return list(expression.args)
    if hasattr(expression, "a"):  # a negation has no second one
        return [expression.a, expression.b] if hasattr(expression, "b") else [expression.a]
    return [expression.value] if isinstance(expression, tirx.Cast) else []
