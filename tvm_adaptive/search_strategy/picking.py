"""Which of the proposed candidates make up a batch: best score, or score and diversity.

A score is an acquisition value, higher is better, not negative.

References
----------
.. [1] Chen et al.: Learning to Optimize Tensor Programs, NeurIPS 2018, section 3.3 (the
   diversity objective, greedy for it is submodular).
.. [2] Ahn et al.: Chameleon, ICLR 2020, section 4.2 (adaptive sampling by k-means).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from tvm_adaptive.values.trial import FloatArray

# Weight of one candidate's share of unseen knob values against a score scaled to [0, 1]:
# at 1 a candidate that is new in every knob may outrank the best, and no more.
DIVERSITY_WEIGHT = 1.0
# Proposals per candidate of a batch, from which diversity chooses.
DIVERSITY_RATIO = 3
# Restarts of k-means; from a single random start the clusters are too noisy to use.
_KMEANS_RESTARTS = 3

IndexArray = npt.NDArray[np.intp]


def pick(
    scores: FloatArray,
    n: int,
    diversity: str,
    *,
    knobs: Callable[[], Sequence[Sequence[Hashable]]],
    vectors: Callable[[], FloatArray],
    rng: np.random.Generator,
) -> list[int]:
    """Pick ``n`` candidates by score, and by diversity."""
    if diversity == "knobs":
        picked = pick_diverse(scores, knobs(), n)
    elif diversity == "medoids":
        picked = pick_medoids(scores, vectors(), n, rng)
    else:
        picked = pick_best(scores, n)
    return [int(i) for i in picked]


def pick_best(scores: FloatArray, n: int) -> IndexArray:
    """Return the indices of the ``n`` highest scores, best first, ties in order."""
    return np.argsort(-scores, kind="stable")[:n]


def pick_diverse(
    scores: FloatArray,
    knobs: Sequence[Sequence[Hashable]],
    n: int,
    weight: float = DIVERSITY_WEIGHT,
) -> IndexArray:
    """Pick greedily by normalised score plus the weighted share of unseen knob values [1]_."""
    top = float(scores.max(initial=0.0))
    scaled = scores / top if top > 0 else np.zeros_like(scores)
    seen: set[tuple[int, Hashable]] = set()
    left = list(range(len(scores)))
    picked: list[int] = []
    while left and len(picked) < n:
        gains = [scaled[i] + weight * _share_unseen(knobs[i], seen) for i in left]
        choice = left.pop(int(np.argmax(gains)))
        seen.update(enumerate(knobs[choice]))
        picked.append(choice)
    return np.asarray(picked, dtype=np.intp)


def pick_medoids(
    scores: FloatArray, vectors: FloatArray, n: int, rng: np.random.Generator
) -> IndexArray:
    """Pick the best-scored member of each of ``n`` clusters [2]_; centres are no schedules."""
    if len(scores) <= n:
        return pick_best(scores, n)
    from sklearn.cluster import KMeans  # takes a second to import

    spread = vectors.std(axis=0)
    points = (vectors - vectors.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    n_distinct = len(np.unique(points, axis=0))
    model = KMeans(
        n_clusters=min(n, n_distinct),
        n_init=_KMEANS_RESTARTS,
        random_state=int(rng.integers(2**31)),
    )
    labels = model.fit_predict(points)
    order = pick_best(scores, len(scores))
    _, first = np.unique(labels[order], return_index=True)
    medoids = order[np.sort(first)]
    # Fewer distinct points than ``n``: fill by score.
    rest = order[~np.isin(order, medoids)]
    return np.concatenate([medoids, rest])[:n]


def _share_unseen(knobs: Sequence[Hashable], seen: set[tuple[int, Hashable]]) -> float:
    if not knobs:
        return 0.0
    return sum((j, value) not in seen for j, value in enumerate(knobs)) / len(knobs)
