"""The cost model ``"rfei"``: the adapter between MetaSchedule and the surrogate."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np

from tvm_adaptive._tvm import (
    MeasureCandidate,
    PerStoreFeature,
    PyCostModel,
    RunnerResult,
    TuneContext,
    derived_object,
    module_key,
    register_error,
    workload_key,
)
from tvm_adaptive.cost_model.dataset import Dataset, TargetKind
from tvm_adaptive.cost_model.family import FamilySurrogate
from tvm_adaptive.cost_model.features import Rows, to_rows
from tvm_adaptive.cost_model.forest import Std
from tvm_adaptive.cost_model.storage import read_dataset, write_dataset
from tvm_adaptive.cost_model.surrogate import Acquisition, Surrogate, SurrogateOptions
from tvm_adaptive.errors import ModelFileError
from tvm_adaptive.measure_callback.journal import JournalWriter, NullJournal
from tvm_adaptive.values.trial import FloatArray, Prediction, Trial
from tvm_adaptive.values.trial_log import TrialLog

logger = logging.getLogger(__name__)

# Calls of load() pass through C++, which turns errors that it does not know into
# RuntimeError.
register_error(ModelFileError.__name__, ModelFileError)


@derived_object
class RFEICostModel(PyCostModel):  # type: ignore[misc]
    """Random forest and expected improvement, one forest for all tasks of a run.

    Surrogate and acquisition of AdaTune (Li et al., NeurIPS 2020, section 4.2). With the
    paper's ``target="throughput"`` a forest ranks worse than with logarithms, and
    failures pull its mean to 0, hence the default.

    Parameters
    ----------
    n_trees : int
        Trees of the forest, at least 2. Default 24.
    std : str
        Standard deviation of a forecast: ``"between-tree"``, ``"total"`` or
        ``"jackknife"``; see :mod:`tvm_adaptive.cost_model.forest`.
        Default ``"between-tree"``.
    target : str
        What the forest learns, each task by its own best: ``"log"``, the logarithm of
        the relative throughput, failures apart in a model of their own; or
        ``"throughput"``, the relative throughput, failures as 0. Default ``"log"``.
    acquisition : str or callable
        ``"ei"`` scores by expected improvement, ``"mean"`` by the forecast alone; a
        function of mean, standard deviation and incumbent (arrays of shape (n,), and a
        number; higher is better) returns the logarithm of what each candidate is worth.
        Default ``"ei"``.
    max_features : float
        Share of features tried at a split, in (0, 1]. Default 1/3.
    seed : int or None
        Same seed and measurements give the same scores; None draws one. Default None.
    n_jobs : int
        Threads that fit the forest. Default 2.
    trial_log : TrialLog or None
        Has features that the search extracted, and timing errors if the runner notes them:
        a candidate that was timed roughly counts less. Gets the features of all other
        candidates. Default None.
    journal : JournalWriter or None
        Receives ``"fit"``, ``"forecast"`` and ``"error"`` events. Default None.

    Raises
    ------
    InvalidOptionError
        When an option is out of range.
    """

    def __init__(
        self,
        *,
        n_trees: int = 24,
        std: Std = "between-tree",
        target: TargetKind = "log",
        acquisition: Acquisition = "ei",
        max_features: float = 1 / 3,
        seed: int | None = None,
        n_jobs: int = 2,
        trial_log: TrialLog | None = None,
        journal: JournalWriter | None = None,
    ) -> None:
        super().__init__()
        options = SurrogateOptions(
            n_trees=n_trees,
            std=std,
            target=target,
            acquisition=acquisition,
            max_features=max_features,
            n_jobs=n_jobs,
        )
        if seed is None:
            seed = int(np.random.default_rng().integers(2**31))
        self._surrogate = self._new_surrogate(options, seed)
        self._rng = np.random.default_rng(seed)
        self._trial_log = trial_log
        self._journal: JournalWriter = journal or NullJournal()
        self._extractor = PerStoreFeature()

    @property
    def is_trained(self) -> bool:
        """Whether scores say anything: some task of the run had a success."""
        dataset = self._surrogate.dataset
        return len(dataset) > dataset.n_failures

    def update(
        self,
        context: TuneContext,
        candidates: list[MeasureCandidate],
        results: list[RunnerResult],
    ) -> None:
        """Learn a batch; whatever goes wrong is logged and journalled, never raised.

        Parameters
        ----------
        context : TuneContext
        candidates, results : lists of the same length, which may be 0
            A result without a positive finite time is a failure.
        """
        try:
            if len(candidates):
                self._learn(context, candidates, results)
        except Exception as error:
            self._report("update", context, error)

    def predict(self, context: TuneContext, candidates: list[MeasureCandidate]) -> FloatArray:
        """Score candidates for native evolution.

        Parameters
        ----------
        context : TuneContext
        candidates : list

        Returns
        -------
        ndarray of shape (n,), float64
            Positive, higher is better; random before the first success, constant
            should scoring fail.
        """
        n = len(candidates)
        scores = None
        try:
            # Features cost milliseconds each, and nothing could score them yet.
            if n and self.is_trained:
                scores = self.scores_of(context, self.describe(context, candidates))
        except Exception as error:
            self._report("predict", context, error)
            return np.ones(n)
        if scores is None:
            return self._rng.uniform(0.5, 1.0, size=n)
        return scores

    def posterior(
        self, context: TuneContext, candidates: list[MeasureCandidate]
    ) -> Prediction | None:
        """Return what is believed of the candidates' throughput.

        Parameters
        ----------
        context : TuneContext
        candidates : list

        Returns
        -------
        Prediction or None
            Normalised throughput: the task's best is 1.0. None while there is nothing
            to say: no success in this task, no candidates, or an error, which is logged.
        """
        try:
            return self.posterior_of(context, self.describe(context, candidates))
        except Exception as error:
            self._report("posterior", context, error)
            return None

    def describe(self, context: TuneContext, candidates: list[MeasureCandidate]) -> Rows:
        """Return the features of candidates, for :meth:`scores_of` and :meth:`posterior_of`.

        Extracting them costs milliseconds each, and scoring them again microseconds.

        Parameters
        ----------
        context : TuneContext
        candidates : list

        Returns
        -------
        ndarray of shape (n, d), float32
        """
        if not len(candidates):
            return to_rows([])
        tensors = self._extractor.extract_from(context, candidates)
        return to_rows([tensor.numpy() for tensor in tensors])

    def scores_of(
        self, context: TuneContext, rows: Rows, cost_sec: FloatArray | None = None
    ) -> FloatArray | None:
        """Score candidates by their features, as :meth:`predict` does.

        Parameters
        ----------
        context : TuneContext
        rows : ndarray of shape (n, d)
        cost_sec : ndarray of shape (n,) or None, default None
            What it takes to build and measure each; None where it is the same for all.

        Returns
        -------
        ndarray of shape (n,), or None before the first success
            Positive, higher is better.
        """
        key = self._key(context)
        self._refit_if_due(context, key)
        return self._surrogate.scores(key, rows, cost_sec)

    def posterior_of(self, context: TuneContext, rows: Rows) -> Prediction | None:
        """Return what is believed of candidates by their features, as :meth:`posterior` does.

        Parameters
        ----------
        context : TuneContext
        rows : ndarray of shape (n, d)

        Returns
        -------
        Prediction or None
            None without rows, or before the task's first success.
        """
        if not len(rows):
            return None
        key = self._key(context)
        self._refit_if_due(context, key)
        return self._surrogate.posterior(key, rows)

    def refit(self, context: TuneContext) -> None:
        """Learn what was measured since the last fit, if it is worth a fit."""
        self._refit_if_due(context, self._key(context))

    def accuracy_of(self, context: TuneContext) -> float:
        """Return the rank correlation of the last forecasts with what was measured.

        Parameters
        ----------
        context : TuneContext

        Returns
        -------
        float
            In [-1, 1], higher is better; NaN before the first forecast.
        """
        return float(self._surrogate.accuracy_of(self._key(context)))

    def save(self, path: str) -> None:
        """Write the samples that the model learns from to a file, atomically.

        Parameters
        ----------
        path : str
        """
        write_dataset(Path(path), self._surrogate.dataset, self._surrogate.header())

    def load(self, path: str) -> None:
        """Replace all samples by those of a file; the options stay this model's.

        Parameters
        ----------
        path : str

        Raises
        ------
        ModelFileError
            When the file is missing, damaged, of an unknown version, or has features of
            another kind; the model is then unchanged.
        """
        dataset, _ = read_samples(Path(path))
        self._surrogate.replace_dataset(dataset)

    @property
    def n_features(self) -> int:
        """How many features a candidate has; samples with others are of no use here."""
        return int(to_rows([]).shape[1])

    def preload(self, dataset: Dataset) -> None:
        """Learn what earlier runs measured; their times are compared among themselves only.

        Parameters
        ----------
        dataset : Dataset
            Samples whose features are not this model's are left out.
        """
        self._surrogate.preload(dataset.of_width(self.n_features))

    def restore(
        self,
        context: TuneContext,
        rows: Rows,
        seconds: FloatArray,
        errors: FloatArray | None = None,
    ) -> None:
        """Learn what an earlier sitting of this run measured of a task, as if just now.

        Parameters
        ----------
        context : TuneContext
        rows : ndarray of shape (n, d), float32
            Features; of another width, another version's, they are left out.
        seconds : ndarray of shape (n,)
            NaN for a failure.
        errors : ndarray of shape (n,) or None, default None
            Relative standard errors of the times; NaN where unknown.
        """
        if rows.shape[1] == self.n_features:
            self._surrogate.add(self._key(context), rows, seconds, errors)

    def _learn(
        self,
        context: TuneContext,
        candidates: list[MeasureCandidate],
        results: list[RunnerResult],
    ) -> None:
        key = self._key(context)
        rows, errors = self._logged(context, candidates)
        seconds = np.array([Trial.of(each).seconds for each in results])
        quality = self._surrogate.check(key, rows, seconds)
        self._surrogate.add(key, rows, seconds, errors)
        if quality is not None:
            self._journal.write("forecast", task=context.task_name, **dataclasses.asdict(quality))

    def _logged(
        self, context: TuneContext, candidates: list[MeasureCandidate]
    ) -> tuple[Rows, FloatArray | None]:
        """Return features and timing errors; features are extracted where the log has none."""
        if self._trial_log is None:
            return self.describe(context, candidates), None
        keys = [module_key(each.sch.mod) for each in candidates]
        missing = [i for i, key in enumerate(keys) if self._trial_log.get(key).features is None]
        found = self.describe(context, [candidates[i] for i in missing])
        for i, row in zip(missing, found, strict=True):
            self._trial_log.note(keys[i], features=row)
        trials = [self._trial_log.get(key) for key in keys]
        rows = np.stack([each.features for each in trials if each.features is not None])
        return rows, np.array([each.relative_error for each in trials])

    def _new_surrogate(self, options: SurrogateOptions, seed: int) -> Surrogate | FamilySurrogate:
        return Surrogate(options, seed)

    def _key(self, context: TuneContext) -> str:
        return workload_key(context.mod)

    def _refit_if_due(self, context: TuneContext, key: str) -> None:
        report = self._surrogate.refit_if_due(key)
        if report is not None:
            self._journal.write("fit", task=context.task_name, **dataclasses.asdict(report))

    def _report(self, hook: str, context: TuneContext, error: Exception) -> None:
        task: Any = getattr(context, "task_name", None)
        logger.error("cost model: %s failed for task %s", hook, task, exc_info=error)
        try:
            self._journal.write(
                "error", part="cost_model", hook=hook, task=task, message=repr(error)
            )
        except Exception:
            logger.exception("cost model: the journal cannot be written")


def read_samples(path: Path) -> tuple[Dataset, dict[str, Any]]:
    """Read samples and what was written with them."""
    dataset, header = read_dataset(path)
    width = to_rows([]).shape[1]
    if dataset.width not in (None, width):
        raise ModelFileError(
            f"{path} has {dataset.width} features per candidate, this model uses {width}; "
            "it was written with other features. Start without the file."
        )
    return dataset, header
