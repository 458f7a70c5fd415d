"""Ranks of values, without ``scipy.stats``, whose import takes a second of each command."""

from __future__ import annotations

import numpy as np

from tvm_adaptive.values.trial import FloatArray


def average_ranks(values: FloatArray) -> FloatArray:
    """Return the ranks from 1 on; equal values share the mean of theirs, NaN is not allowed."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2.0)[inverse.reshape(-1)])
