"""Estimate one robust time and its standard error from the times of micro-batches.

Timing noise has a long right tail (interrupts, other processes), which shifts the plain
mean. The trimmed mean drops the tails: of n micro-batches g at each end, so that h = n - 2 g
are left. Its standard error comes from the winsorised standard deviation s_w (ddof = 1).

References
----------
Tukey & McLaughlin (1963), "Less vulnerable confidence and significance procedures for
location based on a single sample", Sankhya A 25. Yuen (1974), "The two-sample trimmed t
for unequal population variances", Biometrika 61.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tvm_adaptive.values.noise import MAD_TO_SIGMA
from tvm_adaptive.values.trial import FloatArray

# The usual choice for long tails (Wilcox 2012): tolerates one bad batch in five at each end
# and is about 90 % efficient under normal noise.
TRIM_SHARE = 0.2
# With fewer, trimming at both ends leaves no spread; the median is used.
MIN_TRIMMED = 5
# Standard error of a median over that of a mean under normal noise, in the limit. For three
# and four batches the true factor is smaller, so the error is overestimated.
MEDIAN_SE_FACTOR = math.sqrt(math.pi / 2)
# The spread of fewer others is too uncertain to call the first one an outlier.
MIN_OTHERS_TO_DROP = 4
# Farther than three robust standard deviations: 0.3 % of clean first batches are lost.
OUTLIER_SIGMAS = 3.0


@dataclasses.dataclass(frozen=True)
class Summary:
    """Robust location of micro-batch means."""

    mean_sec: float  # robust location, seconds, lower is better
    stderr_sec: float  # its standard error, seconds; ``nan`` for a single batch
    dof: float  # degrees of freedom of Student's t for the pair; 0 for a single batch
    n_batches: int  # batches kept (a first batch dropped as warm-up is not among them)


def summarize(batch_means_sec: FloatArray) -> Summary:
    """Return the robust location of micro-batch means and its standard error.

    One batch: itself. Two: their mean. Three or four: the median, with the standard
    error of a mean widened by ``sqrt(pi / 2)``. Five or more: the 20 % trimmed mean with
    Yuen's ``stderr = sqrt((n - 1) s_w^2 / (h (h - 1)))`` and h - 1 degrees of freedom.
    """
    times = without_warmup(np.asarray(batch_means_sec, dtype=np.float64))
    n = len(times)
    if n == 0:
        raise ValueError("Expected at least one micro-batch to summarize, but got none.")
    if n == 1:
        return Summary(float(times[0]), math.nan, 0.0, 1)
    if n < MIN_TRIMMED:
        widen = 1.0 if n == 2 else MEDIAN_SE_FACTOR
        stderr = widen * float(np.std(times, ddof=1)) / math.sqrt(n)
        return Summary(float(np.median(times)), stderr, n - 1.0, n)
    ordered = np.sort(times)
    g = int(TRIM_SHARE * n)
    h = n - 2 * g
    winsorised = np.clip(ordered, ordered[g], ordered[n - g - 1])
    stderr = math.sqrt((n - 1) * float(np.var(winsorised, ddof=1)) / (h * (h - 1)))
    return Summary(float(np.mean(ordered[g : n - g])), stderr, h - 1.0, n)


def without_warmup(batch_means_sec: FloatArray) -> FloatArray:
    """Drop the first micro-batch, while caches and clocks settle, if it is an outlier."""
    others = batch_means_sec[1:]
    if len(others) < MIN_OTHERS_TO_DROP:
        return batch_means_sec
    center = float(np.median(others))
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(others - center)))
    outlier = abs(float(batch_means_sec[0]) - center) > OUTLIER_SIGMAS * sigma
    return others if outlier else batch_means_sec
