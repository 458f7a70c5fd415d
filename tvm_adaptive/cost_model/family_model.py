"""The cost model ``"rfei-family"``: one forest per family of tasks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import TuneContext, anchor_of, derived_object, workload_key
from tvm_adaptive.cost_model.family import MIN_SAMPLES, MIN_TASKS, FamilySurrogate
from tvm_adaptive.cost_model.model import RFEICostModel, read_samples
from tvm_adaptive.cost_model.surrogate import SurrogateOptions
from tvm_adaptive.errors import check_at_least, check_choices


def _anchor_and_sketches(context: TuneContext) -> str:
    spaces = context.space_generator.generate_design_space(context.mod)
    kinds = [[str(inst.kind.name) for inst in space.trace.insts] for space in spaces]
    return f"{anchor_of(context.mod)}-{hashlib.sha256(repr(kinds).encode()).hexdigest()[:12]}"


_FAMILY_OF: dict[str, Callable[[TuneContext], str]] = {
    "anchor": _anchor_and_sketches,
    "op": lambda context: family_operator(str(context.task_name)),
}
FAMILY_KINDS = tuple(_FAMILY_OF)


@derived_object
class RFEIFamilyCostModel(RFEICostModel._cls):  # type: ignore[misc, name-defined]
    """Forests and expected improvement, one forest for each family of tasks.

    FamilySeer (ICPP 2023). While a family has fewer than ``min_tasks`` tasks or
    ``min_samples`` samples that its forest learns, one forest of all tasks answers for it.
    Failures are among these with target ``"throughput"`` alone.

    Parameters
    ----------
    family : {"anchor", "op"}, default "anchor"
        What makes tasks one family: ``"anchor"`` the heaviest block and the instructions
        of the sketches, ``"op"`` the first operator of the task's name (FamilySeer's own
        choice).
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
        self._min_tasks = min_tasks
        self._min_samples = min_samples
        super().__init__(**options)

    def load(self, path: str) -> None:
        """Replace all samples by those of a file, with their families; raises ModelFileError."""
        dataset, header = read_samples(Path(path))
        self._surrogate.replace(dataset, dict(header.get("families", {})))

    def _new_surrogate(self, options: SurrogateOptions, seed: int) -> FamilySurrogate:
        return FamilySurrogate(
            options, seed, min_samples=self._min_samples, min_tasks=self._min_tasks
        )

    def _key(self, context: TuneContext) -> str:
        key = workload_key(context.mod)
        if key not in self._surrogate.families:
            self._surrogate.assign({key: _FAMILY_OF[self._kind](context)})
        return key


def family_operator(task_name: str) -> str:
    """Return the first operator of a fused function's name: ``fused_conv2d3_add`` is conv2d."""
    first = task_name.removeprefix("fused_").split("_", 1)[0]
    # Relax numbers functions of one name, and the 2 of conv2d is no such number.
    found = re.match(r"[A-Za-z]+(?:\dd)?", first)
    return found.group() if found else first
