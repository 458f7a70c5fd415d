"""The cost model ``"rfei"``: the adapter between MetaSchedule and the surrogate."""

from __future__ import annotations

import dataclasses
import logging
import pickle
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
from tvm_adaptive.cost_model.dataset import Dataset
from tvm_adaptive.cost_model.features import to_rows
from tvm_adaptive.cost_model.storage import read_dataset, write_dataset
from tvm_adaptive.cost_model.surrogate import Surrogate, SurrogateOptions
from tvm_adaptive.errors import ModelFileError
from tvm_adaptive.measure_callback.journal import JournalWriter, NullJournal, write_guarded
from tvm_adaptive.values.hooks import Rows
from tvm_adaptive.values.trial import FloatArray, Prediction, Trial
from tvm_adaptive.values.trial_log import TrialLog

logger = logging.getLogger(__name__)

# Calls of load() pass through C++, which turns errors that it does not know into RuntimeError.
register_error(ModelFileError.__name__, ModelFileError)


@derived_object
class RFEICostModel(PyCostModel):  # type: ignore[misc]
    """Random forest and expected improvement, one forest for all tasks of a run.

    Surrogate and acquisition of AdaTune (Li et al., NeurIPS 2020, section 4.2), by default
    with a root of the throughput and ceilings of tasks with few trials; see
    :mod:`tvm_adaptive.cost_model.targets` and :mod:`tvm_adaptive.cost_model.ceilings`.

    Parameters
    ----------
    seed : int or None, default None
        Same seed and measurements give the same scores; None draws one.
    trial_log : TrialLog or None, default None
        Has features that the search extracted, and timing errors: a candidate that was
        timed roughly counts less. Gets the features of all other candidates.
    journal : JournalWriter or None, default None
        Receives ``"fit"``, ``"forecast"`` and ``"error"`` events.
    **options : Any
        Fields of :class:`~tvm_adaptive.cost_model.surrogate.SurrogateOptions`.

    Raises
    ------
    InvalidOptionError
        When an option is out of range.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        trial_log: TrialLog | None = None,
        journal: JournalWriter | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if seed is None:
            seed = int(np.random.default_rng().integers(2**31))
        self._surrogate = self._new_surrogate(SurrogateOptions(**options), seed)
        self._rng = np.random.default_rng(seed)
        self._trial_log = trial_log
        self._journal: JournalWriter = journal or NullJournal()
        self._extractor = PerStoreFeature()

    @property
    def is_trained(self) -> bool:
        """Whether scores rank candidates: some task of the run had a success."""
        dataset = self._surrogate.dataset
        return len(dataset) > dataset.n_failures

    @property
    def n_features(self) -> int:
        """How many features a candidate has; samples with others are of no use here."""
        return int(to_rows([]).shape[1])

    def update(
        self,
        context: TuneContext,
        candidates: list[MeasureCandidate],
        results: list[RunnerResult],
    ) -> None:
        """Learn a batch; whatever goes wrong is logged and journalled, never raised."""
        try:
            if len(candidates):
                self._learn(context, candidates, results)
        except Exception as error:
            self._report("update", context, error)

    def predict(self, context: TuneContext, candidates: list[MeasureCandidate]) -> FloatArray:
        """Score candidates for native evolution.

        Returns
        -------
        ndarray of shape (n,), float64
            Positive, higher is better; random before the first success, constant
            if scoring fails.
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
        return self._rng.uniform(0.5, 1.0, size=n) if scores is None else scores

    def posterior(
        self, context: TuneContext, candidates: list[MeasureCandidate]
    ) -> Prediction | None:
        """Return the posterior of the candidates' throughput.

        Returns
        -------
        Prediction or None
            Normalised throughput: the task's best is 1.0. None without a success in this
            task, without candidates, or after an error, which is logged.
        """
        try:
            return self.posterior_of(context, self.describe(context, candidates))
        except Exception as error:
            self._report("posterior", context, error)
            return None

    def describe(self, context: TuneContext, candidates: list[MeasureCandidate]) -> Rows:
        """Return the features of candidates, of shape (n, d), which take milliseconds each."""
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
            Seconds to build and measure each; None where they are the same for all.

        Returns
        -------
        ndarray of shape (n,), or None before the first success
            Positive, higher is better.
        """
        key = self.refit(context)
        return self._surrogate.serving(key).scores(key, rows, cost_sec)

    def posterior_of(self, context: TuneContext, rows: Rows) -> Prediction | None:
        """Return the posterior of rows of features, as :meth:`posterior` does of candidates."""
        if not len(rows):
            return None
        key = self.refit(context)
        return self._surrogate.serving(key).posterior(key, rows)

    def accuracy_of(self, context: TuneContext) -> float:
        """Return the rank correlation of the last forecasts with measurements; NaN at first."""
        return float(self._surrogate.serving(self._key(context)).accuracy)

    def save(self, path: str) -> None:
        """Write the samples that the model learns from to a file, atomically."""
        write_dataset(Path(path), self._surrogate.dataset, self._surrogate.header())

    def load(self, path: str) -> None:
        """Replace all samples by those of a file; the options stay this model's.

        Raises
        ------
        ModelFileError
            When the file is missing, damaged, of an unknown version, or has features of
            another kind; the model is then unchanged.
        """
        dataset, _ = read_samples(Path(path))
        self._surrogate.replace_dataset(dataset)

    def preload(self, dataset: Dataset, *, fading: bool = False) -> None:
        """Learn what earlier runs measured; their times are compared among themselves only.

        Samples whose features are not this model's are left out.

        Parameters
        ----------
        dataset : Dataset
        fading : bool, default False
            Whether another machine measured: of such samples, fewer are learned the more
            this one measures.
        """
        if dataset.width == self.n_features:
            self._surrogate.preload(dataset, fading=fading)

    def restore(
        self,
        context: TuneContext,
        rows: Rows,
        seconds: FloatArray,
        errors: FloatArray | None = None,
    ) -> None:
        """Learn what an earlier attempt of this run measured of a task, as if just now.

        Parameters
        ----------
        context : TuneContext
        rows : ndarray of shape (n, d), float32
            Features; of another width, another version's, they are left out.
        seconds : ndarray of shape (n,)
            NaN for a failure.
        errors : ndarray of shape (n,) or None, default None
            Relative standard errors; NaN where unknown.
        """
        if rows.shape[1] == self.n_features:
            self._surrogate.add(self._key(context), rows, seconds, errors)

    def snapshot(self, context: TuneContext) -> bytes:
        """Return a pickle by which another process of this run scores a task's candidates."""
        self.refit(context)
        return pickle.dumps(self._surrogate.frozen())

    def install(self, snapshot: bytes) -> None:
        """Answer as the model that a snapshot was taken of."""
        self._surrogate = pickle.loads(snapshot)

    def _learn(
        self,
        context: TuneContext,
        candidates: list[MeasureCandidate],
        results: list[RunnerResult],
    ) -> None:
        pairs = zip(candidates, map(Trial.of, results), strict=True)
        tried = [(each, trial) for each, trial in pairs if not trial.is_untried]
        if not tried:
            return
        key = self._key(context)
        rows, errors = self._logged(context, [candidate for candidate, _ in tried])
        seconds = np.array([trial.seconds for _, trial in tried])
        quality = self._surrogate.serving(key).check(key, rows, seconds)
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

    def _new_surrogate(self, options: SurrogateOptions, seed: int) -> Surrogate:
        return Surrogate(options, seed)

    def _key(self, context: TuneContext) -> str:
        return workload_key(context.mod)

    def refit(self, context: TuneContext) -> str:
        """Refit the task's surrogate if that is due, and return the task's key."""
        key = self._key(context)
        report = self._surrogate.serving(key).refit_if_due()
        if report is not None:
            self._journal.write("fit", task=context.task_name, **dataclasses.asdict(report))
        return key

    def _report(self, hook: str, context: TuneContext, error: Exception) -> None:
        task = context.task_name
        logger.error("cost model: %s failed for task %s", hook, task, exc_info=error)
        fields = {"part": "cost_model", "hook": hook, "task": task, "message": repr(error)}
        write_guarded(self._journal, "error", **fields)


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
