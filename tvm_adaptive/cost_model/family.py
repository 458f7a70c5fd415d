"""One surrogate per family of tasks, and one of all tasks while a family is small.

FamilySeer (Zhang et al., ICPP 2023; RFC 57 of tvm-rfcs) trains one cost model per family,
because a model of everything may average away what matters to one kind of operator. Unlike
in its released code, a family without enough samples or tasks is served by the model of all
tasks, and a loaded model knows its families.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm_adaptive.cost_model.dataset import Dataset
from tvm_adaptive.cost_model.surrogate import Surrogate, SurrogateOptions
from tvm_adaptive.values.hooks import Rows
from tvm_adaptive.values.trial import FloatArray

# A forest of fewer samples ranks worse than one of all tasks' (FamilySeer waits for one
# batch of 64 per task).
MIN_SAMPLES = 128
# One or two tasks are not typical of a family.
MIN_TASKS = 3


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
        if not changed & {key for key, _ in self.dataset}:
            return
        self.parts = {}
        for key, task in self.dataset:
            if name := self._family_of.get(key):
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
        n_learned = part.dataset.n_learned(self.options.target)
        return part if n_learned >= self.min_samples else self

    def header(self) -> dict[str, Any]:
        """Return options, seed and families for a saved file; JSON-ready."""
        return {**super().header(), "families": self._family_of}

    def replace(self, dataset: Dataset, families: Mapping[str, str]) -> None:
        """Forget everything and start from a dataset of earlier runs and its families."""
        self.replace_dataset(dataset)
        self.parts, self._family_of = {}, {}
        self.assign(families)
        for part in self.parts.values():
            part.replace_dataset(part.dataset)

    def _part(self, name: str) -> Surrogate:
        return self.parts.setdefault(name, Surrogate(self.options, self.seed))
