r"""What the forest learns of a time: a power of the throughput relative to its task's ceiling.

==============  =================  ==========================================================
target          of a ratio r       for
==============  =================  ==========================================================
``log``         log r              spreads in factors, the slowest candidates included
``root``        2 (sqrt(r) - 1)    between the two: slow candidates are alike, fast ones apart
``throughput``  r                  AdaTune
==============  =================  ==========================================================

The first two are the transformation of Box and Cox ("An Analysis of Transformations", JRSS B
26, 1964) with powers 0 and 1/2; near r = 1 both change as r does. Higher is better.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from tvm_adaptive.values.trial import FloatArray

TargetKind = Literal["root", "log", "throughput"]
TARGETS: tuple[str, ...] = get_args(TargetKind)
_POWERS: dict[TargetKind, float] = {"log": 0.0, "root": 0.5, "throughput": 1.0}


def learns_failures(target: TargetKind) -> bool:
    """Whether failures are learned as a throughput of 0, not by a model of their own."""
    return target == "throughput"


def target_of(ratio: FloatArray, target: TargetKind) -> FloatArray:
    """Return the targets of relative throughputs, which are above 0."""
    if target == "log":
        return np.asarray(np.log(ratio))
    return np.asarray(ratio if target == "throughput" else 2.0 * (np.sqrt(ratio) - 1.0))


def ratio_of(y: FloatArray, target: TargetKind) -> FloatArray:
    """Return the relative throughputs of targets."""
    if target == "log":
        return np.exp(y)
    return np.asarray(y if target == "throughput" else np.square(np.maximum(1.0 + y / 2.0, 0.0)))


def error_of(ratio: FloatArray, errors: FloatArray, target: TargetKind) -> FloatArray:
    """Return the standard errors of targets whose times have the given relative errors."""
    return np.asarray(errors * ratio ** _POWERS[target])
