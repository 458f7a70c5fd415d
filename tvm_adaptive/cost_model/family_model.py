"""The cost model ``"rfei-family"``: one forest per family of tasks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import TuneContext, anchor_of, block_names, derived_object, workload_key
from tvm_adaptive.cost_model.dataset import Dataset
from tvm_adaptive.cost_model.family import MIN_SAMPLES, MIN_TASKS, FamilySurrogate, learn_families
from tvm_adaptive.cost_model.model import RFEICostModel, read_samples
from tvm_adaptive.cost_model.storage import write_dataset
from tvm_adaptive.cost_model.surrogate import SurrogateOptions
from tvm_adaptive.errors import ModelFileError, check_at_least, check_choices

_SUFFIX = ".family.npz"
# Families are learned anew whenever there are so many times as many samples as the last
# time: n^2 comparisons of forests are milliseconds each.
_RELEARN_GROWTH = 1.5
_FIRST_LEARN = 256


def _anchor_and_sketches(context: TuneContext) -> str:
    spaces = context.space_generator.generate_design_space(context.mod)
    kinds = [[str(inst.kind.name) for inst in space.trace.insts] for space in spaces]
    return f"{anchor_of(context.mod)}-{_short(repr(kinds))}"


_FAMILY_OF: dict[str, Callable[[TuneContext], str]] = {
    "anchor": _anchor_and_sketches,
    "op": lambda context: operator_of(str(context.task_name)),
    "hash": lambda context: _short(repr(block_names(context.mod))),
    "task": lambda context: workload_key(context.mod),
}
FAMILY_KINDS = (*_FAMILY_OF, "learned")


@derived_object
class RFEIFamilyCostModel(RFEICostModel._cls):  # type: ignore[misc, name-defined]
    """Forests and expected improvement, one forest for each family of tasks.

    FamilySeer (ICPP 2023). While a family has fewer than ``min_tasks`` tasks or
    ``min_samples`` samples, one forest of all tasks answers for it.

    Parameters
    ----------
    family : {"anchor", "op", "hash", "task", "learned"}, default "anchor"
        What makes tasks one family: ``"anchor"`` the heaviest block and the instructions
        of the sketches, ``"op"`` the first operator of the task's name (FamilySeer's own
        choice), ``"hash"`` the names of all blocks, ``"task"`` nothing: each task is a
        family of its own; ``"learned"``: that their models rank one another's candidates.
    min_samples : int, default 128
    min_tasks : int, default 3
    **options : Any
        Parameters of :class:`~tvm_adaptive.RFEICostModel`.

    Raises
    ------
    InvalidOptionError
        When an option is unknown or out of range.
    """

    def __init__(
        self,
        *,
        family: str = "anchor",
        min_samples: int = MIN_SAMPLES,
        min_tasks: int = MIN_TASKS,
        **options: Any,
    ) -> None:
        check_choices("family", family, FAMILY_KINDS)
        check_at_least("min_samples", min_samples, 1)
        check_at_least("min_tasks", min_tasks, 1)
        self._kind = family
        # FamilySeer's "ind" has nothing to wait for: one task is the whole family.
        self._min_tasks = 1 if family == "task" else min_tasks
        self._min_samples = min_samples
        self._n_learned_from = 0
        super().__init__(**options)

    def save(self, path: str) -> None:
        """Write each family to a file of its own in a folder, atomically.

        The folder is made if missing. Files of families that are no more are deleted.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        written = set()
        for name, dataset in self._surrogate.by_family().items():
            file = folder / f"{_slug(name)}{_SUFFIX}"
            write_dataset(file, dataset, {**self._surrogate.header(), "family": name})
            written.add(file)
        for file in set(folder.glob(f"*{_SUFFIX}")) - written:
            file.unlink()

    def load(self, path: str) -> None:
        """Replace all samples by those of a folder, each family's by its own file.

        Raises
        ------
        ModelFileError
            When there is no file of a family, or one is damaged or has features of
            another kind; the model is then unchanged.
        """
        files = sorted(Path(path).glob(f"*{_SUFFIX}"))
        if not files:
            raise ModelFileError(f"{path} holds no families of a cost model; check the path.")
        datasets: dict[str, Dataset] = {}
        for file in files:
            dataset, header = read_samples(file)
            datasets[str(header.get("family", ""))] = dataset
        self._surrogate.replace(datasets)
        self._n_learned_from = 0

    def _new_surrogate(self, options: SurrogateOptions, seed: int) -> FamilySurrogate:
        return FamilySurrogate(
            options, seed, min_samples=self._min_samples, min_tasks=self._min_tasks
        )

    def _key(self, context: TuneContext) -> str:
        key = workload_key(context.mod)
        if self._kind == "learned":
            self._learn_families()
        elif key not in self._surrogate.families:
            self._surrogate.assign({key: _FAMILY_OF[self._kind](context)})
        return key

    def _learn_families(self) -> None:
        n_samples = self._surrogate.dataset.n_added
        if n_samples < max(_FIRST_LEARN, _RELEARN_GROWTH * self._n_learned_from):
            return
        self._n_learned_from = n_samples
        families = learn_families(self._surrogate.dataset, seed=self._surrogate.seed)
        self._surrogate.assign(families)
        self._journal.write("families", n_samples=n_samples, families=families)


def operator_of(task_name: str) -> str:
    """Return the first operator of a fused function's name: ``fused_conv2d3_add`` is conv2d."""
    first = task_name.removeprefix("fused_").split("_", 1)[0]
    # Relax numbers functions of one name, and the 2 of conv2d is no such number.
    found = re.match(r"[A-Za-z]+(?:\dd)?", first)
    return found.group() if found else first


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _slug(name: str) -> str:
    """Return a file name for a family; different for different families."""
    if not name:
        return "none"
    plain = re.sub(r"[^A-Za-z0-9-]+", "_", name)[:40]
    return f"{plain}-{_short(name)}"
