"""A set of hashes is a set, in a few bytes each."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.values import hash_set
from tvm_adaptive.values.hash_set import HashSet

words = st.integers(-(2**63), 2**64 - 1)


@given(st.lists(st.lists(words, max_size=8), max_size=8), words)
def test_it_is_a_set(batches: list[list[int]], other: int) -> None:
    found, plain = HashSet(), set()
    for batch in batches:
        found.update(batch)
        plain |= {value % 2**64 for value in batch}
    assert set(found) == plain
    assert len(found) == len(plain)
    assert all(value in found for batch in batches for value in batch)
    assert (other in found) == (other % 2**64 in plain)
    for value in [other, *(value for batch in batches[::2] for value in batch)]:
        found.discard(value)
        plain.discard(value % 2**64)
    assert set(found) == plain


def test_it_stays_one_when_it_grows() -> None:
    values = np.random.default_rng(0).integers(2**63, size=5 * hash_set._MIN_WAITING).tolist()
    found = HashSet()
    for start in range(0, len(values), 100):
        found.update([*values[start : start + 100], values[0]])
    assert len(found) == len(values)
    assert len(found._waiting) <= hash_set._MIN_WAITING
    assert set(found) == set(values)
    assert all(value in found for value in values)
    assert values[0] + 1 not in found
    found.discard(values[0])
    assert values[0] not in found
    assert len(found) == len(values) - 1
    again = pickle.loads(pickle.dumps(found))
    assert values[-1] in again
    assert len(pickle.dumps(found)) < 12 * len(values)
