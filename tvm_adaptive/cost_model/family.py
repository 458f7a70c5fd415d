"""One surrogate per family of tasks, and one of all tasks while a family is small.

FamilySeer (Zhang et al., ICPP 2023; RFC 57 of tvm-rfcs) trains one cost model per family,
because a model of everything may average away what matters to one kind of operator. What
its released code gets wrong is done otherwise here: a family without enough samples is
served by the model of all tasks instead of by chance, families of one or two tasks are
not split off, and each family is saved to, and read from, a file of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from tvm_adaptive.cost_model.dataset import Dataset, TaskSamples, targets_of
from tvm_adaptive.cost_model.features import Rows
from tvm_adaptive.cost_model.forest import Forest
from tvm_adaptive.cost_model.surrogate import (
    BatchQuality,
    FitReport,
    Surrogate,
    SurrogateOptions,
    rank_correlation,
)
from tvm_adaptive.values.trial import FloatArray, Prediction

# A forest of fewer samples ranks worse than one of all tasks' (FamilySeer waits for one
# batch of 64 per task).
MIN_SAMPLES = 128
# One or two tasks have too little to say about a family.
MIN_TASKS = 3
# Tasks whose models rank one another's candidates at least so well are of one family.
MIN_CORRELATION = 0.5
# From fewer samples a rank correlation is mostly noise.
_MIN_TO_COMPARE = 32
_N_TREES = 24


class FamilySurrogate:
    """Answers as a :class:`Surrogate` does, each task by its family's if that knows enough."""

    def __init__(
        self,
        options: SurrogateOptions,
        seed: int,
        *,
        min_samples: int = MIN_SAMPLES,
        min_tasks: int = MIN_TASKS,
    ) -> None:
        self.options = options
        self.seed = seed
        self.min_samples = min_samples
        self.min_tasks = min_tasks
        self.whole = Surrogate(options, seed)
        self.parts: dict[str, Surrogate] = {}
        self._family_of: dict[str, str] = {}

    @property
    def dataset(self) -> Dataset:
        """All samples of all tasks."""
        return self.whole.dataset

    @property
    def families(self) -> Mapping[str, str]:
        """The family of each task."""
        return self._family_of

    def assign(self, families: Mapping[str, str]) -> None:
        """Say which family tasks belong to; those that change take their samples along."""
        changed = {key for key, name in families.items() if self._family_of.get(key) != name}
        self._family_of.update(families)
        touched = {self._family_of[key] for key in changed}
        if changed & {key for key, _ in self.dataset}:
            touched |= set(self.parts)
        for name in touched:
            self.parts.pop(name, None)
        for key, task in self.dataset:
            name = self._family_of.get(key, "")
            if name in touched and name:
                self._part(name).dataset.share(self.dataset, key, len(task.seconds))

    def add(
        self, key: str, rows: Rows, seconds: FloatArray, errors: FloatArray | None = None
    ) -> None:
        """Learn what was measured of a task; a task without a family is one of all only."""
        self.whole.add(key, rows, seconds, errors)
        if len(seconds) and (name := self._family_of.get(key)):
            self._part(name).dataset.share(self.dataset, key, len(seconds))
        # The samples that the whole has dropped must not stay in the families.
        for part in self.parts.values():
            part.dataset.follow(self.dataset)

    def preload(self, dataset: Dataset) -> None:
        """Add what earlier runs measured; their families are not known."""
        self.whole.preload(dataset)

    def serving(self, key: str) -> Surrogate:
        """Return the surrogate that answers for a task."""
        part = self.parts.get(self._family_of.get(key, ""))
        if part is None or part.dataset.n_tasks < self.min_tasks:
            return self.whole
        return part if len(part.dataset) >= self.min_samples else self.whole

    def refit_if_due(self, key: str) -> FitReport | None:
        """Grow the forest that answers for a task, see :meth:`Surrogate.refit_if_due`."""
        return self.serving(key).refit_if_due(key)

    def scores(self, key: str, rows: Rows, cost_sec: FloatArray | None = None) -> FloatArray | None:
        """Score candidates, see :meth:`Surrogate.scores`."""
        return self.serving(key).scores(key, rows, cost_sec)

    def posterior(self, key: str, rows: Rows) -> Prediction | None:
        """Return what is believed of candidates, see :meth:`Surrogate.posterior`."""
        return self.serving(key).posterior(key, rows)

    def check(self, key: str, rows: Rows, seconds: FloatArray) -> BatchQuality | None:
        """Judge a forecast, see :meth:`Surrogate.judge`."""
        return self.serving(key).check(key, rows, seconds)

    def accuracy_of(self, key: str) -> float:
        """Return how good the forecasts for a task's family were of late."""
        return self.serving(key).accuracy

    def header(self) -> dict[str, object]:
        """Return what saved files say about their origin; JSON-ready."""
        return self.whole.header()

    def by_family(self) -> dict[str, Dataset]:
        """Return the samples of each family; ``""`` are those without one."""
        found: dict[str, Dataset] = {}
        for key, task in self.dataset:
            part = found.setdefault(self._family_of.get(key, ""), Dataset())
            part.share(self.dataset, key, len(task.seconds))
        return found

    def replace(self, datasets: Mapping[str, Dataset]) -> None:
        """Forget everything and start from the samples of families."""
        self.whole = Surrogate(self.options, self.seed)
        self.parts = {}
        self._family_of = {}
        for name, dataset in datasets.items():
            for key, task in dataset:
                if name:
                    self._family_of[key] = name
                self.add(key, task.rows, task.seconds, task.errors)

    def replace_dataset(self, dataset: Dataset) -> None:
        """Forget everything and start from samples whose families are not known."""
        self.replace({"": dataset})

    def _part(self, name: str) -> Surrogate:
        return self.parts.setdefault(name, Surrogate(self.options, self.seed))


def learn_families(
    dataset: Dataset,
    *,
    seed: int,
    min_correlation: float = MIN_CORRELATION,
    min_samples: int = _MIN_TO_COMPARE,
    grow: Callable[[Rows, FloatArray, int], Callable[[Rows], FloatArray]] | None = None,
) -> dict[str, str]:
    """Group tasks whose models rank one another's candidates well.

    This is what FamilySeer means by similar and does not compute. The similarity of two
    tasks is the mean of both rank correlations; groups are joined while the average
    similarity between them is high enough (average linkage).
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    make = grow or _grow_forest
    known = [(key, task) for key, task in dataset if int(task.succeeded.sum()) >= min_samples]
    if len(known) < 2:
        return {key: "learned-1" for key, _ in known}
    models = [make(*targets_of(task, "log"), seed) for _, task in known]
    distance = np.zeros((len(known), len(known)))
    for i, j in itertools.combinations(range(len(known)), 2):
        both = (_agreement(models[i], known[j][1]), _agreement(models[j], known[i][1]))
        distance[i, j] = distance[j, i] = 1.0 - float(np.mean(both))
    labels = fcluster(
        linkage(squareform(distance), method="average"), 1.0 - min_correlation, "distance"
    )
    return {key: f"learned-{label}" for (key, _), label in zip(known, labels, strict=True)}


def _grow_forest(rows: Rows, y: FloatArray, seed: int) -> Callable[[Rows], FloatArray]:
    forest = Forest(n_trees=_N_TREES, n_jobs=1).fit(rows, y, seed)
    return lambda unseen: forest.predict(unseen)[0]


def _agreement(model: Callable[[Rows], FloatArray], task: TaskSamples) -> float:
    rows, y = targets_of(task, "log")
    # A constant forecast tells no candidate from another.
    return float(np.nan_to_num(rank_correlation(model(rows), y), nan=0.0))
