"""Which form of a part of a network is the fastest."""

from __future__ import annotations

import math

from tvm_adaptive.values.forms import (
    DIRECT,
    NO_FORM,
    FormKey,
    fastest_forms,
    form_costs,
    in_use,
)

A, B = FormKey("conv", DIRECT), FormKey("conv", "winograd")
KEYS = [NO_FORM, A, A, B, B]


def test_the_form_of_least_total_is_used() -> None:
    costs = [1.0, 3.0, 3.0, 1.0, 4.0]
    assert form_costs(KEYS, costs) == {"conv": {DIRECT: 6.0, "winograd": 5.0}}
    assert in_use(KEYS, costs) == [True, False, False, True, True]


def test_a_form_that_lacks_a_time_is_not_used() -> None:
    costs = [1.0, 3.0, 3.0, 1.0, math.inf]
    assert in_use(KEYS, costs) == [True, True, True, False, False]


def test_without_times_and_for_equal_ones_the_direct_form_is_used() -> None:
    assert in_use(KEYS, [math.inf] * 5) == [True, True, True, False, False]
    assert fastest_forms({"conv": {"winograd": 2.0, DIRECT: 2.0}}) == {"conv": DIRECT}


def test_tasks_without_alternatives_are_always_used() -> None:
    assert in_use([NO_FORM, NO_FORM], [1.0, math.inf]) == [True, True]
    assert in_use([], []) == []
