"""Which of several ways to compute the same part of a network is the fastest.

A part with alternatives is a *group*; each alternative is a *form* of it and consists of one
or several tasks. The form without a name is the network as it was prepared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

DIRECT = ""


class FormKey(NamedTuple):
    """The form that a task belongs to; both are empty for a task without alternatives."""

    group: str = ""
    form: str = DIRECT


NO_FORM = FormKey()


def form_costs(keys: Sequence[FormKey], costs: Sequence[float]) -> dict[str, dict[str, float]]:
    """Return the cost of each form of each group, the sum of its tasks'; infinite if one is."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for key, cost in zip(keys, costs, strict=True):
        if key.group:
            found[key.group][key.form] += cost
    return {group: dict(forms) for group, forms in found.items()}


def fastest_forms(costs: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Return the form of least cost of each group; without any cost, the direct one."""
    return {
        group: min(forms, key=lambda form: (forms[form], form != DIRECT))
        for group, forms in costs.items()
    }


def in_use(keys: Sequence[FormKey], costs: Sequence[float]) -> list[bool]:
    """Say for each task whether it belongs to the fastest form of its group, or to none."""
    if not any(key.group for key in keys):
        return [True] * len(keys)
    fastest = fastest_forms(form_costs(keys, costs))
    return [not key.group or fastest[key.group] == key.form for key in keys]
