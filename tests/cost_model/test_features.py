import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tvm_adaptive.cost_model.features import FEATURE_LENGTH, MAX_STORES, heaviest_first, to_rows

COPY = np.zeros(FEATURE_LENGTH)
PAD = np.zeros(FEATURE_LENGTH)
PAD[5] = 28.0  # mathematical functions, more of them than the main store's operations
MAIN = np.zeros(FEATURE_LENGTH)
MAIN[1:3] = 21.0
COPY[150] = PAD[150] = MAIN[150] = 3.0


def test_stores_keep_their_slot_when_another_store_appears():
    rows = to_rows([np.stack([MAIN]), np.stack([MAIN, COPY]), np.stack([PAD, MAIN, COPY])])
    assert rows.shape == (3, MAX_STORES * FEATURE_LENGTH)
    assert rows.dtype == np.float32
    slots = rows.reshape(3, MAX_STORES, FEATURE_LENGTH)
    np.testing.assert_array_equal(slots[:, 0], np.stack([MAIN] * 3))
    np.testing.assert_array_equal(slots[0, 1:], 0)
    np.testing.assert_array_equal(slots[1, 1], COPY)
    np.testing.assert_array_equal(slots[2, 1:3], np.stack([PAD, COPY]))


def test_the_heaviest_stores_are_kept_when_there_are_too_many():
    block = np.stack([COPY] * MAX_STORES + [PAD, MAIN])
    slots = to_rows([block]).reshape(MAX_STORES, FEATURE_LENGTH)
    np.testing.assert_array_equal(slots[0], MAIN)
    np.testing.assert_array_equal(slots[1], PAD)
    np.testing.assert_array_equal(slots[2:], np.stack([COPY] * (MAX_STORES - 2)))


@pytest.mark.parametrize("shape", [(0,), (0, FEATURE_LENGTH), (0, 0), (3, 0)])
def test_a_candidate_without_stores_is_a_row_of_zeros(shape):
    rows = to_rows([np.zeros(shape), np.stack([MAIN])])
    assert not rows[0].any()
    assert rows[1].any()


def test_no_candidates_give_no_rows():
    assert to_rows([]).shape == (0, MAX_STORES * FEATURE_LENGTH)


@pytest.mark.parametrize("length", [1, 10, 163, 172])
def test_another_feature_length_is_cut_or_filled(length):
    block = np.arange(1.0, length + 1)[None, :]
    slot = to_rows([block]).reshape(MAX_STORES, FEATURE_LENGTH)[0]
    kept = min(length, FEATURE_LENGTH)
    np.testing.assert_array_equal(slot[:kept], block[0, :kept])
    np.testing.assert_array_equal(slot[kept:], 0)


def test_what_is_not_finite_becomes_finite():
    block = np.array([[np.nan, np.inf, -np.inf]])
    assert np.isfinite(to_rows([block])).all()


@given(
    block=hnp.arrays(
        np.float64, st.tuples(st.integers(1, 8), st.just(12)), elements=st.integers(0, 3)
    ),
    seed=st.integers(0, 99),
)
def test_the_row_does_not_depend_on_the_order_of_the_stores(block, seed):
    shuffled = np.random.default_rng(seed).permutation(block)
    np.testing.assert_array_equal(to_rows([block]), to_rows([shuffled]))
    assert sorted(heaviest_first(block[None])[0]) == list(range(len(block)))


def test_the_input_is_left_alone():
    block = np.stack([COPY, MAIN])
    before = block.copy()
    to_rows([block])
    np.testing.assert_array_equal(block, before)
