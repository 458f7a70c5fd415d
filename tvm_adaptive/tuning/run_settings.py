"""The settings of a run, read back from its journal: model, target, configuration, bounds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tvm_adaptive.database.location import NO_STORE
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.history import History, read_history
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE
from tvm_adaptive.tuning.config_file import config_of_fields
from tvm_adaptive.tuning.session import RunOptions

# The fields of a run's first events, and their types.
_RUN: dict[str, tuple[type, ...]] = {
    "target": (dict, str),
    "config": (dict,),
    "seed": (int,),
    "budget_sec": (float, int, type(None)),
    "trials": (int, type(None)),
    "until_ms": (float, int, type(None)),
}
_MODEL: dict[str, tuple[type, ...]] = {"what": (str,), "input_shapes": (dict,)}


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """A run's settings, and what it did with them."""

    options: RunOptions  # of the last attempt; the store's name is the journal's
    input_shapes: dict[str, list[int]]
    inputs: str | None  # the file of the user's inputs
    history: History


def read_settings(work_dir: Path) -> RunSettings:
    """Read a run's settings; a model given in Python cannot be read back."""
    path = work_dir / JOURNAL_FILE
    history = read_history(path)
    if not history.run:
        raise InvalidOptionError(f"There is no run in {work_dir}.")
    if history.model is None or history.model.get("what") is None:
        raise InvalidOptionError(
            f"The run in {work_dir} was given its model in Python: resume it there with "
            "resume=True, or compile it there with tvm_adaptive.models.compile_network."
        )
    run, model = history.run, history.model
    odd = [
        name
        for event, kinds in ((run, _RUN), (model, _MODEL))
        for name, kind in kinds.items()
        if not isinstance(event.get(name, ...), kind)
    ]
    if odd:
        raise InvalidOptionError(
            f"The journal in {work_dir} lacks settings of the run, or has them in another form "
            f"than this version ({', '.join(odd)}); start again in another directory, the store "
            "knows its records."
        )
    fields = {**run["config"], "store": str(run["config"].get("store") or NO_STORE)}
    options = RunOptions(
        what=model["what"],
        work_dir=work_dir,
        config=config_of_fields(fields, str(path)),
        resume=True,
        **{name: run[name] for name in _RUN if name != "config"},
    )
    inputs = model.get("inputs")
    inputs = inputs if isinstance(inputs, str) else None
    return RunSettings(options, model["input_shapes"], inputs, history)
