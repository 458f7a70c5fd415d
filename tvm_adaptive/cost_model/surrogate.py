"""One forest for all tasks of a run: learn, refit when due, score, state the uncertainty."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np

from tvm_adaptive.cost_model.acquisition import log_expected_improvement, selection_score
from tvm_adaptive.cost_model.dataset import Dataset
from tvm_adaptive.cost_model.forest import STDS, Forest, Std
from tvm_adaptive.cost_model.targets import (
    TARGETS,
    TargetKind,
    learns_failures,
    ratio_of,
    target_of,
)
from tvm_adaptive.errors import InvalidOptionError, check_choices, check_share
from tvm_adaptive.values.hooks import Rows
from tvm_adaptive.values.ranks import average_ranks
from tvm_adaptive.values.trial import FloatArray, Prediction

# From mean, standard deviation and incumbent, higher is better, to the logarithm of what a
# candidate is worth.
LogAcquisition: TypeAlias = Callable[[FloatArray, FloatArray, float], FloatArray]
Acquisition: TypeAlias = Literal["ei", "mean"] | LogAcquisition
ACQUISITIONS = ("ei", "mean")

# Error of a forest of few samples, in either unit of the target (see "Ranking" in
# benchmarks/README.md), until the first fit measures it.
_FIRST_NOISE = 0.3
# No forecast is more certain than the timer: repeated measurements differ by about 1 %.
_MIN_STD = 0.01
# A kernel's time differs so much between two measurements, whatever the timer says of each: of
# 190 candidates that two runs measured, half the ratios were off by 2 %, a normal spread of 3 %
# for two.
_DRIFT = 0.02
# Share of new samples that makes a refit worth its cost, which grows with the data. Stock
# waits for 20 %; the forest is cheap enough for more often.
_REFIT_GROWTH = 0.05
# Batches that the accuracy is averaged over: the accuracy of one of 16 is off by 0.25.
_N_RECENT = 5
# Marks tasks of earlier runs; keys of tasks are hexadecimal digits.
_BEFORE = "before:"
# Marks tasks that another machine measured.
_ELSEWHERE = "elsewhere:"
# Samples of this machine, after which half of those of another machine are learned: from 64 of
# an operator's own samples, a forest already ranks its candidates at 0.66 to 0.69
# (`benchmarks/micro/pools`). `benchmarks/starter/fading.py` measures what the others add.
_HALF_AFTER = 64
# Fewer failures, or fewer successes, do not show which candidates fail.
_MIN_OF_EACH_CLASS = 4
# Only an average is wanted of this forest, no spread.
_N_VALIDITY_TREES = 24
# A throughput of 0 would end a candidate's chances in the evolution for good.
_MIN_SCORE = 1e-6
# A standard normal number lies between this and its negative with a chance of 0.9.
_Z_OF_90_PERCENT = 1.6449
# A rank correlation of two values is always 1 or -1.
_MIN_FOR_QUALITY = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurrogateOptions:
    """Keyword parameters of :class:`~tvm_adaptive.RFEICostModel`.

    Attributes
    ----------
    n_trees : int, default 24
        At least 2; the error of the standard deviation falls with the root of their number.
    std : {"shrunk", "between-tree", "total", "jackknife"}, default "shrunk"
        Standard deviation of a forecast; see :mod:`tvm_adaptive.cost_model.forest`.
    target : {"root", "log", "throughput"}, default "root"
        What the forest learns: ``"root"`` or ``"log"``, a transform of the throughput
        relative to the task's ceiling, failures apart in a model of their own; or
        ``"throughput"``, the throughput relative to the task's best, failures as 0. Failed
        builds are learned with no target. See :mod:`tvm_adaptive.cost_model.targets`.
    acquisition : {"ei", "mean"} or callable, default "ei"
        ``"ei"`` scores by expected improvement, ``"mean"`` by the forecast alone; a
        function of mean, standard deviation and incumbent (arrays of shape (n,), and a
        number; higher is better) returns the logarithm of what each candidate is worth.
    max_features : float or int, default 1/3
        Features tried at a split: a share in (0, 1], but never more than 48; or a number.
    n_jobs : int, default 2
        Threads that fit the forest.

    Raises
    ------
    InvalidOptionError
        When an option is out of range.
    """

    n_trees: int = 24
    std: Std = "shrunk"
    target: TargetKind = "root"
    acquisition: Acquisition = "ei"
    max_features: float | int = 1 / 3
    n_jobs: int = 2

    def __post_init__(self) -> None:
        check_choices("std", self.std, STDS)
        check_choices("target", self.target, TARGETS)
        if not callable(self.acquisition):
            check_choices("acquisition", self.acquisition, ACQUISITIONS)
        numbers = [("n_trees", 2), ("n_jobs", 1)]
        if isinstance(self.max_features, int):
            numbers.append(("max_features", 1))
        else:
            check_share("max_features", self.max_features, "(0, 1]")
        for name, least in numbers:
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InvalidOptionError(
                    f"{name} must be an integer of at least {least} but got {value!r}."
                )


@dataclasses.dataclass(frozen=True)
class FitReport:
    """The samples and the seconds of a refit."""

    n_samples: int
    n_failures: int
    n_tasks: int
    validity: bool
    seconds: float


@dataclasses.dataclass(frozen=True)
class BatchQuality:
    """The quality of the forecast of a batch, computed before the batch is learned."""

    n: int  # candidates with a time
    spearman: float  # rank correlation of predicted and measured throughput; NaN if one is constant
    # Root mean square of (measured - mean) / std: 1 is calibrated, more is overconfident. NaN
    # for a task that the forest had not seen.
    z_rms: float
    # Share of measured values within the 90 % interval of a normal forecast: 0.9 is calibrated.
    # NaN as above.
    coverage: float


class Surrogate:
    """A dataset, and the forest that was last grown from it."""

    def __init__(self, options: SurrogateOptions, seed: int) -> None:
        self.options = options
        self.seed = seed
        self.dataset = Dataset()
        self._forest: Forest | None = None
        self._validity: Forest | None = None
        # Seconds that targets of the last fit are relative to.
        self._ceilings: dict[str, float] = {}
        self._noise_variance = 0.0  # of the measurements, mean of the last fit, units of the target
        # How far the target of each task's best timing is above its posterior mean.
        self._luck: dict[str, float] = {}
        self._n_fitted = 0
        self._n_before = 0  # samples of earlier runs
        self._n_elsewhere = 0  # of them, samples of another machine
        self._qualities: deque[float] = deque(maxlen=_N_RECENT)

    @property
    def accuracy(self) -> float:
        """Mean rank correlation of the last few forecasts; NaN before the first."""
        return float(np.mean(self._qualities)) if self._qualities else math.nan

    def serving(self, key: str) -> Surrogate:
        """Return the surrogate that answers for a task: one for all."""
        del key
        return self

    def replace_dataset(self, dataset: Dataset) -> None:
        """Forget everything and start from another dataset, of earlier runs; a refit is due."""
        self.dataset = dataset
        self._forest = self._validity = None
        self._ceilings, self._luck = {}, {}
        self._qualities.clear()
        self._n_fitted, self._n_before = 0, dataset.n_added
        self._n_elsewhere = sum(
            len(task.seconds) for key, task in dataset if key.startswith(_ELSEWHERE)
        )

    def preload(self, dataset: Dataset, *, fading: bool = False) -> None:
        """Add samples of earlier runs, as tasks of their own, each with its own best.

        Of those of another machine, which are ``fading``, fewer are learned the more this
        one measures.
        """
        for key, task in dataset:
            name = f"{_ELSEWHERE if fading else _BEFORE}{key}"
            self.dataset.add(name, task.rows, task.seconds, task.errors)
            self._n_before += len(task.seconds)
            self._n_elsewhere += len(task.seconds) if fading else 0

    def add(
        self, key: str, rows: Rows, seconds: FloatArray, errors: FloatArray | None = None
    ) -> None:
        """Add samples of a task; see :meth:`Dataset.add`."""
        self.dataset.add(key, rows, seconds, errors)

    def refit_if_due(self) -> FitReport | None:
        """Grow the forest anew if the run's data have grown by 5 % since the last time."""
        news = self.dataset.n_added - self._n_fitted
        # Many samples of earlier runs must not make what this one finds wait to be learned.
        # A full dataset does not grow, and the cost of a fit with it.
        n_own = min(max(0, self._n_fitted - self._n_before), len(self.dataset))
        if news == 0 or news < _REFIT_GROWTH * n_own:
            return None
        start_sec = time.perf_counter()
        learned = self._learned()
        target = self.options.target
        # AdaTune's are relative to the best.
        ceilings = (
            self.dataset.best_secs()
            if target == "throughput"
            else self.dataset.ceilings(lambda key: key.startswith(_ELSEWHERE))
        )
        rows, y, errors = learned.training_set(target, ceilings, _DRIFT)
        self._n_fitted = self.dataset.n_added
        if not len(y):
            return None
        noise = _FIRST_NOISE if self._forest is None else self._forest.oob_rms
        variance = max(noise, _MIN_STD) ** 2
        # The inverse of the sum of the variances of the model and of the timer.
        weights = variance / (variance + errors**2)
        self._forest = self._new_forest(self.options.n_trees).fit(rows, y, self.seed, weights)
        if target != "throughput":
            self._noise_variance = float(np.average(errors**2, weights=weights))
            self._luck = self._lucks(learned, y, errors)
        self._ceilings = ceilings
        self._validity = self._fit_validity(learned)
        return FitReport(
            n_samples=len(y),
            n_failures=self.dataset.n_failures,
            n_tasks=self.dataset.n_tasks,
            validity=self._validity is not None,
            seconds=time.perf_counter() - start_sec,
        )

    def scores(self, key: str, rows: Rows, cost_sec: FloatArray | None = None) -> FloatArray | None:
        """Return positive scores, in proportion to which native evolution draws parents."""
        if self._forest is None:
            return None
        mean, std = self._forest.predict(rows)
        valid = self._probability_valid(rows)
        if self.options.acquisition == "mean":
            worth = ratio_of(mean, self.options.target) * valid
            return np.asarray(
                np.maximum(worth if cost_sec is None else worth / cost_sec, _MIN_SCORE)
            )
        incumbent = self._incumbent(key) - self._luck.get(key, 0.0)
        acquisition = self.options.acquisition
        log_value = log_expected_improvement if acquisition == "ei" else acquisition
        # What measurements scatter is no improvement; the jackknife does not contain it.
        noise = 0.0 if self.options.std == "jackknife" else self._noise_variance
        latent = np.sqrt(np.maximum(std**2 - noise, _MIN_STD**2))
        log_worth = log_value(mean, latent, incumbent)
        # Constrained EI (Gelbart et al. 2014): improvement counts only if it runs.
        log_worth = log_worth + np.log(valid)
        return selection_score(log_worth if cost_sec is None else log_worth - np.log(cost_sec))

    def posterior(self, key: str, rows: Rows) -> Prediction | None:
        """Return mean and standard deviation of the normalised throughput.

        With the log or root target, ``"shrunk"`` is the spread of the trees alone, too.
        """
        if self._forest is None or not math.isfinite(self.dataset.best_sec(key)):
            return None
        if self.options.target == "throughput":
            incumbent = self._incumbent_ratio(key)
            mean, std = self._forest.predict(rows)
            return Prediction(mean / incumbent, std / incumbent)
        # Each tree's forecast is converted before the moments are taken: those of a lognormal
        # are far out of the trees' range when they disagree.
        trees = self._forest.tree_predictions(rows)
        throughput = ratio_of(trees, self.options.target) / self._incumbent_ratio(key)
        std = throughput.std(axis=1)
        if self.options.std in ("total", "jackknife"):
            between = np.maximum(trees.std(axis=1), _MIN_STD)
            std = std * self._forest.predict(rows)[1] / between
        return Prediction(throughput.mean(axis=1), std)

    def check(self, key: str, rows: Rows, seconds: FloatArray) -> BatchQuality | None:
        """Compare the forecast of a batch with its measurement; call it before ``add``."""
        ok = np.isfinite(seconds) & (seconds > 0)
        if self._forest is None or ok.sum() < _MIN_FOR_QUALITY:
            return None
        mean, std = self._forest.predict(rows[ok])
        z_rms = coverage = math.nan
        ceiling_sec = self._ceilings.get(key)
        if ceiling_sec is not None:
            measured = target_of(ceiling_sec / seconds[ok], self.options.target)
            z = (measured - mean) / np.maximum(std, _MIN_STD)
            z_rms = float(np.sqrt(np.mean(z**2)))
            coverage = float(np.mean(np.abs(z) <= _Z_OF_90_PERCENT))
        spearman = rank_correlation(mean, -seconds[ok])
        if math.isfinite(spearman):
            self._qualities.append(spearman)
        return BatchQuality(int(ok.sum()), spearman, z_rms, coverage)

    def frozen(self) -> Surrogate:
        """Return a copy that answers alike until more is measured, with each task's best sample."""
        copied = copy.copy(self)
        copied.dataset = self.dataset.bests()
        copied._n_fitted = copied.dataset.n_added
        copied._n_before = 0
        return copied

    def header(self) -> dict[str, Any]:
        """Return the options and the seed for a saved file; JSON-ready."""
        acquisition = self.options.acquisition
        name = acquisition if isinstance(acquisition, str) else repr(acquisition)
        return {**dataclasses.asdict(self.options), "acquisition": name, "seed": self.seed}

    def _new_forest(self, n_trees: int) -> Forest:
        return Forest(
            n_trees=n_trees,
            max_features=self.options.max_features,
            std=self.options.std,
            n_jobs=self.options.n_jobs,
        )

    def _learned(self) -> Dataset:
        """Return the samples to learn from: of another machine's, the fewer the more there are.

        A smaller weight would change little: trees grow until each leaf has one sample.
        """
        if not self._n_elsewhere:
            return self.dataset
        n_here = self.dataset.n_added - self._n_elsewhere
        share = _HALF_AFTER / (_HALF_AFTER + n_here)
        return self.dataset.with_share(share, lambda key: key.startswith(_ELSEWHERE))

    def _fit_validity(self, learned: Dataset) -> Forest | None:
        n_failures = learned.n_failures
        n_successes = len(learned) - n_failures
        # With target "throughput", failures are among the targets already.
        if (
            learns_failures(self.options.target)
            or min(n_failures, n_successes) < _MIN_OF_EACH_CLASS
        ):
            return None
        rows, labels = learned.validity_set()
        return self._new_forest(_N_VALIDITY_TREES).fit(rows, labels, self.seed)

    def _probability_valid(self, rows: Rows) -> FloatArray:
        if self._validity is None:
            return np.ones(len(rows))
        share = self._validity.tree_predictions(rows).mean(axis=1)
        # Laplace's rule: n samples never prove that a candidate cannot run.
        n = self._validity.n_samples
        return np.asarray((n * share + 1.0) / (n + 2.0))

    def _lucks(self, learned: Dataset, y: FloatArray, errors: FloatArray) -> dict[str, float]:
        """Return how far the best timing of each task is above the best posterior mean.

        Each sample's normal posterior has its timing as the observation, and as the prior the
        forecast of the trees that had not seen it.
        """
        assert self._forest is not None
        unseen = np.where(np.isfinite(self._forest.oob_forecasts), self._forest.oob_forecasts, y)
        spread = max(self._forest.oob_rms**2 - self._noise_variance, _MIN_STD**2)
        means = unseen + spread / (spread + errors**2) * (y - unseen)
        sizes = {key: int(n) for key, task in learned if (n := task.succeeded.sum())}
        ends = np.cumsum(list(sizes.values()))[:-1]
        pairs = zip(np.split(y, ends), np.split(means, ends), strict=True)
        return {
            key: float(of_task.max() - posterior.max())
            for key, (of_task, posterior) in zip(sizes, pairs, strict=True)
        }

    def _incumbent(self, key: str) -> float:
        """Return the target of a task's best."""
        return float(target_of(np.array(self._incumbent_ratio(key)), self.options.target))

    def _incumbent_ratio(self, key: str) -> float:
        """Return a task's best throughput relative to its ceiling; 1 without samples."""
        return self._ceilings[key] / self.dataset.best_sec(key) if key in self._ceilings else 1.0


def rank_correlation(a: FloatArray, b: FloatArray) -> float:
    """Return Spearman's rank correlation; NaN if one side is constant."""
    ranks_a, ranks_b = average_ranks(a), average_ranks(b)
    if np.ptp(ranks_a) == 0 or np.ptp(ranks_b) == 0:
        return math.nan
    return float(np.corrcoef(ranks_a, ranks_b)[0, 1])
