from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tvm_adaptive.models import largest_difference, outputs_agree

FLOATS = arrays(np.float32, 6, elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False))


@given(FLOATS)
def test_outputs_agree_with_themselves(values):
    assert outputs_agree([values], [values])
    assert largest_difference([values], [values]) == (0.0, 0.0)


@given(FLOATS, st.floats(1e-6, 1e6))
def test_agreement_does_not_depend_on_the_unit(values, unit):
    disturbed = values.astype(np.float64) * (1 + 5e-4)
    assert outputs_agree([disturbed * unit], [values.astype(np.float64) * unit])


@pytest.mark.parametrize("position", range(4))
def test_one_wrong_element_is_seen(position):
    reference = np.array([1.0, -2.0, 0.0, 3.0])
    wrong = reference.copy()
    wrong[position] += 0.02
    assert not outputs_agree([wrong], [reference])
    assert largest_difference([wrong], [reference]).max_abs == pytest.approx(0.02)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_agrees(bad):
    broken = np.array([1.0, bad])
    assert not outputs_agree([broken], [broken])
    assert not outputs_agree([broken], [np.ones(2)])
    assert largest_difference([broken], [np.ones(2)]).max_abs == math.inf


@pytest.mark.parametrize("outputs", [[], [np.ones(3)], [np.ones((2, 1))], [np.ones(2)] * 2])
def test_other_shapes_never_agree(outputs):
    assert not outputs_agree(outputs, [np.ones(2)])
    assert largest_difference(outputs, [np.ones(2)]) == (math.inf, math.inf)


def test_relative_difference_leaves_out_zeros():
    difference = largest_difference([np.array([0.5, 3.0])], [np.array([0.0, 2.0])])
    assert difference == (1.0, 0.5)


def test_atol_replaces_the_floor():
    outputs, reference = [np.array([0.0, 1e-5])], [np.array([100.0, 0.0])]
    outputs[0][0] = 100.0
    assert outputs_agree(outputs, reference)
    assert not outputs_agree(outputs, reference, atol=1e-6)


def test_integers_are_equal_but_for_what_rounding_makes_of_a_few():
    classes = np.array([500])
    assert outputs_agree([classes], [classes])
    assert not outputs_agree([classes + 1], [classes])
    pixels = np.arange(200) % 50
    assert outputs_agree([pixels + (np.arange(200) < 2)], [pixels])
    assert not outputs_agree([pixels + (np.arange(200) < 3)], [pixels])
    assert not outputs_agree([pixels + 2 * (np.arange(200) < 1)], [pixels])
