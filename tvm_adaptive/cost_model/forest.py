r"""A random forest that states its uncertainty.

Standard deviations on offer, with t_b(x) the prediction of tree b:

- ``"between-tree"``: of t_b(x) over b, as AdaTune's released code has it. Ad hoc, and 0
  where all trees agree.
- ``"shrunk"``: of ``(n Var_b[t_b(x)] + m e^2) / (n + m)``, with n trees, m = 2 and e^2 the
  mean squared error on samples that trees had not seen. Never 0 by chance; with fully grown
  trees and the log target it is calibrated: on recorded candidates of GMM, trained on 32 to
  128, the root mean square of (measured - mean) / std is 1.0 to 1.1.
- ``"total"``: law of total variance over leaves, ``E_b[var in leaf] + Var_b[t_b(x)]``
  (Hutter et al., "Algorithm runtime prediction", 2014, section 4.3.2). Adds the noise
  within leaves; leaves then hold three samples or more.
- ``"jackknife"``: infinitesimal jackknife (Wager, Hastie and Efron 2014), by forestci.
  The sampling variance of the forest's *mean*, which is smaller than the spread of a new
  measurement; good for asking whether more trees or data would move the mean. Unbiased
  values are negative for most candidates with a few dozen trees and are clipped to 0;
  give it some hundreds.
"""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from tvm_adaptive.values.trial import FloatArray

Std = Literal["shrunk", "between-tree", "total", "jackknife"]
STDS: tuple[str, ...] = get_args(Std)

# With more samples than this, a tree draws fewer than there are, but never below this share
# of them: that bounds the cost of a fit, and every sample is still in the bags of some trees.
FULL_DRAWS = 320
LEAST_SHARE_DRAWN = 0.6
# Values in double precision at the same time, while columns are compared: 32 MB, where all of
# a large fit would be twice as much as its data.
_MAX_CENTERED = 1 << 22
# Features tried at a split, at the most, where a share is asked for. Several hundred vary on
# tasks of many stores, and trying a third of those costs more than it teaches.
MAX_TRIED = 48
# With single-sample leaves, the variance within leaves is 0 by construction.
_MIN_LEAF_FOR_TOTAL = 3
# Starting threads costs about as much as growing trees on this many numbers.
_MIN_SIZE_FOR_THREADS = 8_000
# Two dozen trees agree by chance for some candidates, which is no certainty; so the variance
# includes so many virtual trees that err as much as the forest did on unseen samples.
_PRIOR_TREES = 2.0
# Columns that are multiples of one another split alike. Projections of the standardised
# columns tell them apart as long as they differ by more than rounding. One projection would
# take some pairs of a thousand columns for equal by chance; two do so in one of 65,000 fits.
_EQUAL_DIGITS = 5
_N_PRINTS = 2

Tree = Any


@dataclasses.dataclass(kw_only=True, eq=False)
class Forest:
    """Regression by bagged trees with a standard deviation.

    The trees are scikit-learn's; growing them one by one instead of in its
    ``RandomForestRegressor`` halves the seconds for the few rows that a run starts with.

    Attributes
    ----------
    n_trees, max_features, std, n_jobs
        See :class:`~tvm_adaptive.cost_model.surrogate.SurrogateOptions`.
    """

    n_trees: int = 24
    max_features: float | int = 1 / 3
    std: Std = "shrunk"
    n_jobs: int = 2

    def __post_init__(self) -> None:
        self.n_samples = 0
        self._columns: npt.NDArray[np.intp] = np.zeros(0, dtype=np.intp)
        self._trees: list[Tree] = []
        self._inbag: FloatArray = np.zeros((0, 0))
        self._oob_error = 0.0
        # Of each sample, by the trees that had not seen it; NaN where all have.
        self.oob_forecasts: FloatArray = np.zeros(0)

    @property
    def oob_rms(self) -> float:
        """Root mean squared error on samples, by the trees that had not seen them."""
        return math.sqrt(self._oob_error)

    def fit(
        self,
        X: npt.NDArray[np.float32],
        y: FloatArray,
        seed: int,
        weights: FloatArray | None = None,
    ) -> Forest:
        """Grow the trees from scratch, and return the forest itself.

        Parameters
        ----------
        X : ndarray of shape (n, d), n >= 1
        y : ndarray of shape (n,)
            Finite; higher is better.
        seed : int
            Same seed and data give the same forest, in any process.
        weights : ndarray of shape (n,) or None, default None
            How much each sample counts, above 0: one that counts less is drawn for fewer trees.
            None for all alike.
        """
        n = X.shape[0]
        rng = np.random.default_rng(seed)
        self._columns = distinct_columns(X)
        self.n_samples = n
        size = (self.n_trees, n_draws(n))
        if weights is None or np.ptp(weights) == 0.0:
            draws = rng.integers(0, n, size=size)
        else:
            draws = rng.choice(n, size=size, p=weights / weights.sum())
        counts = [np.bincount(bag, minlength=n) for bag in draws]
        self._inbag = np.stack(counts, axis=1).astype(np.float64)
        seeds = rng.integers(0, 2**31, size=self.n_trees)
        view = self._view(X)

        def grow(b: int) -> Tree:
            return self._grow(view, y, self._inbag[:, b], int(seeds[b]))

        if self.n_jobs == 1 or view.size < _MIN_SIZE_FOR_THREADS:
            self._trees = [grow(b) for b in range(self.n_trees)]
        else:  # scikit-learn releases the interpreter while a tree grows
            with ThreadPoolExecutor(self.n_jobs) as threads:
                self._trees = list(threads.map(grow, range(self.n_trees)))
        self.oob_forecasts = self._forecast_unseen(X)
        known = np.isfinite(self.oob_forecasts)
        errors = self.oob_forecasts[known] - y[known]
        self._oob_error = float(np.mean(errors**2)) if known.any() else 0.0
        return self

    def tree_predictions(self, X: npt.NDArray[np.float32]) -> FloatArray:
        """Return what each tree predicts for X of shape (n, d): shape (n, n_trees), unit of y."""
        view = self._view(X)
        # Straight to the compiled tree: validating the input once per tree costs more
        # than the predictions.
        trees = [tree.tree_.predict(view)[:, 0] for tree in self._trees]
        return np.stack(trees, axis=1)

    def predict(self, X: npt.NDArray[np.float32]) -> tuple[FloatArray, FloatArray]:
        """Return mean and standard deviation, never negative, of shape (n,), unit of y.

        Parameters
        ----------
        X : ndarray of shape (n, d)
        """
        predictions = self.tree_predictions(X)
        variance = predictions.var(axis=1)
        if self.std == "shrunk":
            weight = self.n_trees / (self.n_trees + _PRIOR_TREES)
            variance = weight * variance + (1.0 - weight) * self._oob_error
        elif self.std == "total":
            variance = variance + self._variance_in_leaves(X)
        elif self.std == "jackknife":
            variance = self._jackknife_variance(X)
        return predictions.mean(axis=1), np.sqrt(np.maximum(variance, 0.0))

    def _forecast_unseen(self, X: npt.NDArray[np.float32]) -> FloatArray:
        unseen = self._inbag == 0.0
        judged = unseen.any(axis=1)
        forecasts = np.full(len(X), np.nan)
        if judged.any():
            trees = self.tree_predictions(X[judged])
            forecasts[judged] = np.average(trees, axis=1, weights=unseen[judged])
        return forecasts

    def _view(self, X: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.ascontiguousarray(X[:, self._columns], dtype=np.float32)

    def _variance_in_leaves(self, X: npt.NDArray[np.float32]) -> FloatArray:
        view = self._view(X)
        trees = [estimator.tree_ for estimator in self._trees]
        # The impurity of a regression tree is the variance of the leaf's targets.
        return np.asarray(sum(tree.impurity[tree.apply(view)] for tree in trees) / self.n_trees)

    def _jackknife_variance(self, X: npt.NDArray[np.float32]) -> FloatArray:
        import forestci
        from sklearn.ensemble import RandomForestRegressor

        view = self._view(X)
        ensemble = RandomForestRegressor(n_estimators=self.n_trees)
        ensemble.estimators_ = self._trees
        # If each sample happens to be once in each bag, it divides 0 by 0: no variance.
        with np.errstate(divide="ignore", invalid="ignore"):
            variance = forestci.random_forest_error(
                ensemble,
                (self.n_samples, view.shape[1]),
                view,
                inbag=self._inbag,
                # Its calibration draws from the global random state.
                calibrate=False,
            )
        return np.nan_to_num(np.asarray(variance, dtype=np.float64), nan=0.0)

    def _grow(
        self, view: npt.NDArray[np.float32], y: FloatArray, bag: FloatArray, seed: int
    ) -> Tree:
        from sklearn.tree import DecisionTreeRegressor

        drawn = np.flatnonzero(bag)
        n_features = view.shape[1]
        if isinstance(self.max_features, int):
            n_tried = min(self.max_features, n_features)
        else:
            n_tried = min(math.ceil(self.max_features * n_features), MAX_TRIED)
        tree = DecisionTreeRegressor(
            max_features=n_tried,
            min_samples_leaf=_MIN_LEAF_FOR_TOTAL if self.std == "total" else 1,
            random_state=seed,
        )
        return tree.fit(view[drawn], y[drawn], sample_weight=bag[drawn], check_input=False)


def n_draws(n_samples: int) -> int:
    """Return how many draws with replacement a tree gets of ``n_samples``."""
    return max(min(n_samples, FULL_DRAWS), math.ceil(LEAST_SHARE_DRAWN * n_samples))


def distinct_columns(X: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
    """Return the columns that vary, without those that repeat another up to scale.

    Trees split such columns alike, so that repeats only cost time.

    Parameters
    ----------
    X : ndarray of shape (n, d), n >= 1

    Returns
    -------
    ndarray of shape (k,), indices
        Increasing, 1 <= k <= d: a forest needs a column even if all rows are alike.
    """
    varying = np.flatnonzero(np.not_equal(X, X[0]).any(axis=0))
    if not varying.size:
        return np.zeros(1, dtype=np.intp)
    # Fixed: which columns count must not depend on the seed of a fit.
    directions = np.random.default_rng(0).standard_normal((_N_PRINTS, len(X)))
    n_at_once = max(1, _MAX_CENTERED // len(X))
    prints = np.concatenate(
        [
            _prints(X[:, varying[start : start + n_at_once]], directions)
            for start in range(0, len(varying), n_at_once)
        ]
    )
    _, first = np.unique(np.round(prints, _EQUAL_DIGITS), axis=0, return_index=True)
    return varying[np.sort(first)]


def _prints(columns: npt.NDArray[np.float32], directions: FloatArray) -> FloatArray:
    """Return numbers, (k, 2), for each column that those share which repeat it up to scale."""
    centered = columns.astype(np.float64)
    centered -= centered.mean(axis=0)
    norms = np.sqrt(np.einsum("ij,ij->j", centered, centered))
    return np.asarray((np.abs(directions @ centered) / np.where(norms > 0.0, norms, 1.0)).T)
