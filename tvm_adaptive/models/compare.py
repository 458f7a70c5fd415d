"""Say whether two networks compute the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tvm_adaptive.values.agreement import ROUNDED_SHARE, disagreement

Array = npt.NDArray[Any]


class Difference(NamedTuple):
    """How far two lists of outputs are apart at the worst element.

    ``max_rel`` is relative to the reference and leaves out elements of the reference
    that are zero; both are infinite when shapes differ or only one side is finite.
    """

    max_abs: float
    max_rel: float


def largest_difference(outputs: Sequence[Array], reference: Sequence[Array]) -> Difference:
    """Compare outputs element by element."""
    if not _same_structure(outputs, reference):
        return Difference(math.inf, math.inf)
    max_abs = max_rel = 0.0
    for output, expected in zip(outputs, reference, strict=True):
        got, want = output.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
        with np.errstate(invalid="ignore"):
            distance = np.where(got == want, 0.0, np.abs(got - want))
        distance = np.where(np.isnan(got) & np.isnan(want), 0.0, distance)
        distance = np.where(np.isnan(distance), np.inf, distance)
        scale = np.where(np.isfinite(want), np.abs(want), 1.0)
        relative = distance[scale > 0] / scale[scale > 0]
        max_abs = max(max_abs, float(distance.max(initial=0.0)))
        max_rel = max(max_rel, float(relative.max(initial=0.0)))
    return Difference(max_abs, max_rel)


def outputs_agree(
    outputs: Sequence[Array],
    reference: Sequence[Array],
    rtol: float = 1e-3,
    atol: float | None = None,
) -> bool:
    """Say whether two networks computed the same, but for rounding.

    A floating-point element agrees when ``|output - reference| <= atol + rtol *
    |reference|``; all must, and nothing may be infinite or not a number. Integers must be
    equal, but for one in a hundred that may be off by one, as rounding makes it.
    """
    if not _same_structure(outputs, reference):
        return False
    if not all(np.isfinite(each.astype(np.float64)).all() for each in [*outputs, *reference]):
        return False
    problem = disagreement(reference, outputs, rtol=rtol, atol=atol, rounded_share=ROUNDED_SHARE)
    return problem is None


def _same_structure(outputs: Sequence[Array], reference: Sequence[Array]) -> bool:
    return [output.shape for output in outputs] == [expected.shape for expected in reference]
