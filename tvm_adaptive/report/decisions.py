"""The decisions of trials: how they differ from a task's fastest, and which of them matter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tvm_adaptive.values.trial import FloatArray

if TYPE_CHECKING:
    from tvm_adaptive.report.trials import TrialRow

# Fewer trials of a sketch show by chance which decision matters.
_MIN_TRIALS = 24
# A forest of these learns in a fraction of a second. Of more, the fastest are taken: slow ones
# do not tell what makes fast ones fast.
_MAX_TRIALS = 1000
_N_TREES = 64
# Decisions below explain too little to act on.
_LEAST_SHARE = 0.05
_MAX_DECISIONS = 4


class Decisions(NamedTuple):
    """What a candidate consists of: its sketch, and the parts of each decision."""

    sketch: int
    parts: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Importance:
    """How much of the differences of a task's times one decision explains."""

    task: str
    decision: str
    share: float  # in [0, 1]; of the decisions of a sketch they sum to at most 1
    fastest: str  # what the fastest trial has


def decisions_of(event: dict[str, Any], n_results: int) -> list[Decisions | None]:
    """Return the decisions of each candidate of a round; None where they are not known."""
    known = event.get("decisions") or ()
    if len(known) != n_results:
        return [None] * n_results
    return [
        None if each is None else Decisions(int(each[0]), tuple(map(tuple, each[1])))
        for each in known
    ]


def text_of(part: tuple[int, ...]) -> str:
    """Return a decision in words: a split as a product, another as its number."""
    return " x ".join(map(str, part)) if len(part) > 1 else f"choice {part[0]}"


def difference(decisions: Decisions | None, reference: Decisions | None) -> str:
    """Return in words what differs from other decisions; "" for nothing, or if unknown."""
    if decisions is None or reference is None or decisions == reference:
        return ""
    if len(decisions.parts) != len(reference.parts):
        return f"sketch {decisions.sketch}"
    pairs = enumerate(zip(decisions.parts, reference.parts, strict=True), 1)
    found = [f"{number}: {text_of(own)}" for number, (own, other) in pairs if own != other]
    if decisions.sketch != reference.sketch:
        found.insert(0, f"sketch {decisions.sketch}")
    return "; ".join(found)


def importances(trials: Sequence[TrialRow]) -> list[Importance]:
    """Return the decisions of one task that matter most, the most important first.

    The share of a decision is the decrease of variance that splits by it bring in a forest of
    extremely randomised trees, which learns the logarithms of the times (Geurts et al., Machine
    Learning 63, 2006; Louppe et al., "Understanding variable importances in forests of randomized
    trees", NeurIPS 2013), times the share of the variance of trials that a tree has not learned
    which the forest explains. Empty with fewer than 24 trials of the sketch of the fastest.
    """
    from sklearn.ensemble import ExtraTreesRegressor

    known = [each for each in trials if each.decisions is not None and each.ms > 0]
    if not known:
        return []
    fastest = min(known, key=lambda each: each.ms)
    alike = [each for each in known if _sketch_of(each) == _sketch_of(fastest)]
    if len(alike) < _MIN_TRIALS:
        return []
    alike = sorted(alike, key=lambda each: each.ms)[:_MAX_TRIALS]
    best = _parts(fastest)
    X = np.array([_as_numbers(_parts(each)) for each in alike])
    y = np.log([each.ms for each in alike])
    options = {"bootstrap": True, "oob_score": True, "random_state": 0}
    forest = ExtraTreesRegressor(_N_TREES, **options).fit(X, y)
    ends = np.cumsum([len(part) for part in best])
    groups = np.split(forest.feature_importances_, ends[:-1])
    # Importances add up to 1 even where the times are noise.
    explained = max(0.0, forest.oob_score_)
    shares = np.array([explained * float(group.sum()) for group in groups])
    order = [int(k) for k in np.argsort(-shares)[:_MAX_DECISIONS] if shares[k] >= _LEAST_SHARE]
    return [
        Importance(fastest.task, _name_of(k, best[k]), shares[k], text_of(best[k])) for k in order
    ]


def _parts(trial: TrialRow) -> tuple[tuple[int, ...], ...]:
    assert trial.decisions is not None
    return trial.decisions.parts


def _sketch_of(trial: TrialRow) -> tuple[int, ...]:
    """Return what sketches have in common whose decisions can be compared."""
    return tuple(map(len, _parts(trial)))


def _name_of(number: int, part: tuple[int, ...]) -> str:
    kind = f"split of {math.prod(part)}" if len(part) > 1 else "choice"
    return f"{number + 1}: {kind}"


def _as_numbers(parts: tuple[tuple[int, ...], ...]) -> FloatArray:
    """Return parts of splits as logarithms, others as they are: a tree splits by their order."""
    flat = [
        math.log2(max(value, 1)) if len(part) > 1 else float(value)
        for part in parts
        for value in part
    ]
    return np.array(flat)
