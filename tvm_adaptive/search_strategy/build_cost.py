"""Forecasts of the seconds that a candidate costs, from its decisions.

Those that unroll much take longest to build. The search maximises expected improvement per
second (Snoek et al., "Practical Bayesian Optimization", NeurIPS 2012, section 3.2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_adaptive.search_strategy.knobs import KnobSpace, Point
from tvm_adaptive.values.trial import FloatArray

# Proposing, loading and measuring one candidate: 0.06 s for GMM, 0.11 s for T2D.
OTHER_SEC = 0.1
# Fewer builds give no forecast.
_MIN_BUILDS = 8
# Only the latest builds count: the forest is grown anew after every batch, in half a second of
# CPU time from so many, and the latest are where the search is now.
_MAX_BUILDS = 4096
_N_TREES = 16


class BuildCost:
    """A forecast of one task's seconds per candidate."""

    def __init__(self, space: KnobSpace) -> None:
        self._space = space
        self._points: deque[Point] = deque(maxlen=_MAX_BUILDS)
        self._seconds: deque[float] = deque(maxlen=_MAX_BUILDS)
        self._forest: Any = None

    def add(self, point: Point, seconds: float) -> None:
        """Learn a build's share of its batch's seconds."""
        self._points.append(point)
        self._seconds.append(seconds)
        self._forest = None

    def carry(self) -> tuple[list[Point], list[float]]:
        """Return the builds that were learned, for :meth:`resume`."""
        return list(self._points), list(self._seconds)

    def resume(self, carried: tuple[list[Point], list[float]]) -> None:
        """Continue with the builds that another process learned."""
        points, seconds = carried
        if seconds != list(self._seconds):
            self._forest = None
        self._points, self._seconds = deque(points, _MAX_BUILDS), deque(seconds, _MAX_BUILDS)

    def seconds(self, points: Sequence[Point]) -> FloatArray | None:
        """Return the expected total cost of candidates; None while unknown."""
        if len(self._seconds) < _MIN_BUILDS or not len(points):
            return None
        if self._forest is None:
            from sklearn.ensemble import ExtraTreesRegressor  # takes a second to import

            # Fixed: what a build costs is no random choice of the search.
            forest = ExtraTreesRegressor(_N_TREES, min_samples_leaf=2, random_state=0)
            self._forest = forest.fit(self._space.encode(self._points), np.log(self._seconds))
        return np.asarray(OTHER_SEC + np.exp(self._forest.predict(self._space.encode(points))))
