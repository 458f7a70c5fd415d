"""One surrogate per family of tasks, and one of all tasks while a family is small.

FamilySeer (Zhang et al., ICPP 2023; RFC 57 of tvm-rfcs) trains one cost model per family,
because a model of everything may average away what matters to one kind of operator. Unlike
in its released code, a family without enough samples or tasks is served by the model of all
tasks, and each family is saved to, and read from, a file of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from tvm_adaptive.cost_model.dataset import Dataset, targets_of
from tvm_adaptive.cost_model.forest import Forest
from tvm_adaptive.cost_model.surrogate import Surrogate, SurrogateOptions, rank_correlation
from tvm_adaptive.values.hooks import Rows
from tvm_adaptive.values.trial import FloatArray

# A forest of fewer samples ranks worse than one of all tasks' (FamilySeer waits for one
# batch of 64 per task).
MIN_SAMPLES = 128
# One or two tasks are not typical of a family.
MIN_TASKS = 3
# Tasks whose models rank one another's candidates at least so well are of one family.
MIN_CORRELATION = 0.5
# From fewer samples a rank correlation is mostly noise.
_MIN_TO_COMPARE = 32
_N_TREES = 24


class FamilySurrogate(Surrogate):
    """A surrogate of all tasks, with one more for each family that has enough samples."""

    def __init__(
        self,
        options: SurrogateOptions,
        seed: int,
        *,
        min_samples: int = MIN_SAMPLES,
        min_tasks: int = MIN_TASKS,
    ) -> None:
        super().__init__(options, seed)
        self.min_samples = min_samples
        self.min_tasks = min_tasks
        self.parts: dict[str, Surrogate] = {}
        self._family_of: dict[str, str] = {}

    @property
    def families(self) -> Mapping[str, str]:
        """The family of each task."""
        return self._family_of

    def assign(self, families: Mapping[str, str]) -> None:
        """Set the families of tasks; a task that changes takes its samples along."""
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
        """Add samples of a task, to those of its family, too, if it has one."""
        super().add(key, rows, seconds, errors)
        if len(seconds) and (name := self._family_of.get(key)):
            self._part(name).dataset.share(self.dataset, key, len(seconds))
        # The samples that the whole has dropped must not stay in the families.
        for part in self.parts.values():
            part.dataset.follow(self.dataset)

    def serving(self, key: str) -> Surrogate:
        """Return the surrogate that answers for a task."""
        part = self.parts.get(self._family_of.get(key, ""))
        if part is None or part.dataset.n_tasks < self.min_tasks:
            return self
        return part if len(part.dataset) >= self.min_samples else self

    def by_family(self) -> dict[str, Dataset]:
        """Return the samples of each family; ``""`` are those without one."""
        found: dict[str, Dataset] = {}
        for key, task in self.dataset:
            part = found.setdefault(self._family_of.get(key, ""), Dataset())
            part.share(self.dataset, key, len(task.seconds))
        return found

    def replace(self, datasets: Mapping[str, Dataset]) -> None:
        """Forget everything and start from the samples of families."""
        self.replace_dataset(Dataset())
        self._qualities.clear()
        self.parts, self._family_of = {}, {}
        for name, dataset in datasets.items():
            for key, task in dataset:
                if name:
                    self._family_of[key] = name
                self.add(key, task.rows, task.seconds, task.errors)

    def _part(self, name: str) -> Surrogate:
        return self.parts.setdefault(name, Surrogate(self.options, self.seed))


def learn_families(
    dataset: Dataset, *, seed: int, min_correlation: float = MIN_CORRELATION
) -> dict[str, str]:
    """Group tasks whose models rank one another's candidates well, by average linkage."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    known = [(key, task) for key, task in dataset if task.succeeded.sum() >= _MIN_TO_COMPARE]
    if len(known) < 2:
        return {key: "learned-1" for key, _ in known}
    samples = [targets_of(task, "log", task.best_sec) for _, task in known]
    forests = [Forest(n_trees=_N_TREES, n_jobs=1).fit(rows, y, seed) for rows, y in samples]
    distance = np.zeros((len(known), len(known)))
    for i, j in itertools.combinations(range(len(known)), 2):
        both = (_agreement(forests[i], *samples[j]), _agreement(forests[j], *samples[i]))
        distance[i, j] = distance[j, i] = 1.0 - float(np.mean(both))
    labels = fcluster(
        linkage(squareform(distance), method="average"), 1.0 - min_correlation, "distance"
    )
    return {key: f"learned-{label}" for (key, _), label in zip(known, labels, strict=True)}


def _agreement(forest: Forest, rows: Rows, y: FloatArray) -> float:
    # A constant forecast tells no candidate from another.
    return float(np.nan_to_num(rank_correlation(forest.predict(rows)[0], y), nan=0.0))
