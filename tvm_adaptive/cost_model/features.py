"""Features of candidates with different numbers of stores, as rows of one matrix.

MetaSchedule describes a candidate by one feature vector for each buffer store. Stock sums
over stores; here every store has a slot of its own, because what is good for the main store
of a program says nothing about its copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive.values.hooks import Rows
from tvm_adaptive.values.trial import FloatArray

# Per-store features of MetaSchedule with its default options.
FEATURE_LENGTH = 164
# Fused blocks of real networks have 1 to 5 stores; each further slot widens every row
# and is empty for nearly all candidates.
MAX_STORES = 6
# The vector starts with counts of floating-point operations: multiply-add, add, multiply,
# divide, compare, mathematical function, other function. Copies have none of them.
_N_FLOAT_COUNTS = 7


def to_rows(blocks: Sequence[npt.NDArray[Any]]) -> Rows:
    """Place the stores of each candidate, of shape (n_stores, n), in one row, heaviest first."""
    rows = np.zeros((len(blocks), MAX_STORES, FEATURE_LENGTH), dtype=np.float32)
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, block in enumerate(blocks):
        if block.ndim == 2 and block.size:
            by_shape.setdefault(block.shape, []).append(i)
    for same in by_shape.values():
        stacked = np.stack([blocks[i] for i in same])
        order = heaviest_first(stacked)[:, :MAX_STORES]
        kept = np.take_along_axis(stacked, order[:, :, None], axis=1)[:, :, :FEATURE_LENGTH]
        rows[same, : kept.shape[1], : kept.shape[2]] = kept
    return np.nan_to_num(rows.reshape(len(blocks), MAX_STORES * FEATURE_LENGTH), copy=False)


def log_work_of(rows: Rows) -> FloatArray:
    """Return the logarithm of the floating-point operations of candidates, of shape (n,).

    0 for rows of other features than :func:`to_rows` makes.
    """
    if rows.shape[1] != MAX_STORES * FEATURE_LENGTH:
        return np.zeros(len(rows))
    stores = rows.reshape(-1, MAX_STORES, FEATURE_LENGTH)[:, :, :_N_FLOAT_COUNTS]
    # Features are base-2 logarithms of a count and one.
    counts = np.exp2(stores.astype(np.float64)) - 1.0
    return np.asarray(np.log1p(counts.sum(axis=(1, 2))))


def heaviest_first(blocks: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Order the stores of each candidate by their features, counts of operations first.

    Inlining a block shifts all later stores of a program to another place; what a store
    computes stays the same under scheduling.
    """
    keys = -np.moveaxis(blocks, 2, 0)
    # Counts are logarithms of exact integers, yet rounding may differ in the last digits.
    keys[:_N_FLOAT_COUNTS] = np.round(keys[:_N_FLOAT_COUNTS], 6)
    return np.lexsort(keys[::-1], axis=-1)
