r"""A random forest that says how sure it is.

==========  =================================================  ===========
symbol      meaning                                            shape
==========  =================================================  ===========
X           rows of features                                   (n, d)
y           targets, higher is better                          (n,)
t_b(x)      prediction of tree b                               (n, n_trees)
N_bi        how often sample i is in the bag of tree b         (n_train, n_trees)
==========  =================================================  ===========

Standard deviations on offer:

- ``"between-tree"``: of t_b(x) over b, as AdaTune's released code has it. Ad hoc, yet with
  fully grown trees and the log target it is calibrated: on recorded candidates of GMM,
  trained on 32 to 128, the root mean square of (measured - mean) / std is 1.0 to 1.1.
- ``"total"``: law of total variance over leaves, ``E_b[var in leaf] + Var_b[t_b(x)]``
  (Hutter et al., "Algorithm runtime prediction", 2014, section 4.3.2). Adds the noise
  within leaves; leaves then hold three samples or more.
- ``"jackknife"``: infinitesimal jackknife (Wager, Hastie and Efron 2014), by forestci.
  The sampling variance of the forest's *mean*, which is smaller than the spread of a new
  measurement; good for asking whether more trees or data would move the mean. Unbiased
  values can be negative with few trees; they are clipped to 0.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from tvm_adaptive.records import FloatArray

Std = Literal["between-tree", "total", "jackknife"]
STDS: tuple[str, ...] = get_args(Std)

# Each tree sees at most so many draws: that bounds the cost of a fit in a long run,
# while all data are still used, by one tree or another.
MAX_DRAWS = 1000
# With single-sample leaves, the variance within leaves is 0 by construction.
_MIN_LEAF_FOR_TOTAL = 3


class Forest:
    """Regression by bagged trees with a standard deviation.

    Parameters
    ----------
    n_trees : int
        The error of the standard deviation falls with the root of their number.
        Default 100.
    max_features : float
        Share of features tried at a split, in (0, 1]. Default 1/3.
    std : str
        ``"between-tree"``, ``"total"`` or ``"jackknife"``; see the module.
        Default ``"between-tree"``.
    n_jobs : int
        Threads for fitting. Default 2.
    """

    def __init__(
        self,
        *,
        n_trees: int = 100,
        max_features: float = 1 / 3,
        std: Std = "between-tree",
        n_jobs: int = 2,
    ) -> None:
        self.n_trees = n_trees
        self.max_features = max_features
        self.std = std
        self.n_jobs = n_jobs
        self.n_samples = 0
        self._columns: npt.NDArray[np.intp] = np.zeros(0, dtype=np.intp)
        self._regressor: Any = None
        self._inbag: npt.NDArray[np.float64] | None = None

    def fit(self, X: npt.NDArray[np.float32], y: FloatArray, seed: int) -> Forest:
        """Grow the trees from scratch.

        Parameters
        ----------
        X : ndarray of shape (n, d), n >= 1
        y : ndarray of shape (n,)
            Finite; higher is better.
        seed : int
            Same seed and data give the same forest, in any process.

        Returns
        -------
        Forest
            Itself.
        """
        from sklearn.ensemble import RandomForestRegressor

        n = X.shape[0]
        varying = np.flatnonzero(np.not_equal(X, X[0]).any(axis=0))
        # A forest needs a column even if all candidates look the same.
        self._columns = varying if varying.size else np.zeros(1, dtype=np.intp)
        self.n_samples = n
        self._regressor = RandomForestRegressor(
            n_estimators=self.n_trees,
            max_features=self.max_features,
            min_samples_leaf=_MIN_LEAF_FOR_TOTAL if self.std == "total" else 1,
            max_samples=MAX_DRAWS if n > MAX_DRAWS else None,
            n_jobs=self.n_jobs,
            random_state=seed,
        ).fit(self._view(X), y)
        self._inbag = None
        return self

    def tree_predictions(self, X: npt.NDArray[np.float32]) -> FloatArray:
        """Return what each tree predicts.

        Parameters
        ----------
        X : ndarray of shape (n, d)

        Returns
        -------
        ndarray of shape (n, n_trees), unit of y
        """
        view = self._view(X)
        # Straight to the compiled tree: validating the input once per tree costs more
        # than the predictions.
        trees = [tree.tree_.predict(view)[:, 0] for tree in self._regressor.estimators_]
        return np.stack(trees, axis=1)

    def predict(self, X: npt.NDArray[np.float32]) -> tuple[FloatArray, FloatArray]:
        """Return mean and standard deviation.

        Parameters
        ----------
        X : ndarray of shape (n, d)

        Returns
        -------
        mean, std : ndarray of shape (n,), unit of y
            ``std`` is of the kind that the constructor was given, never negative.
        """
        predictions = self.tree_predictions(X)
        mean = predictions.mean(axis=1)
        variance = predictions.var(axis=1)
        if self.std == "total":
            variance = variance + self._variance_in_leaves(X)
        elif self.std == "jackknife":
            variance = self._jackknife_variance(X)
        return mean, np.sqrt(np.maximum(variance, 0.0))

    def _view(self, X: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.ascontiguousarray(X[:, self._columns], dtype=np.float32)

    def _variance_in_leaves(self, X: npt.NDArray[np.float32]) -> FloatArray:
        view = self._view(X)
        total = np.zeros(X.shape[0])
        for estimator in self._regressor.estimators_:
            tree = estimator.tree_
            # The impurity of a regression tree is the variance of the leaf's targets.
            total += tree.impurity[tree.apply(view)]
        return total / self.n_trees

    def _jackknife_variance(self, X: npt.NDArray[np.float32]) -> FloatArray:
        import forestci

        view = self._view(X)
        if self._inbag is None:
            self._inbag = forestci.calc_inbag(self.n_samples, self._regressor)
        # If each sample happens to be once in each bag, it divides 0 by 0: no variance.
        with np.errstate(divide="ignore", invalid="ignore"):
            variance = forestci.random_forest_error(
                self._regressor,
                (self.n_samples, view.shape[1]),
                view,
                inbag=self._inbag,
                # Its calibration draws from the global random state.
                calibrate=False,
            )
        return np.nan_to_num(np.asarray(variance, dtype=np.float64), nan=0.0)
