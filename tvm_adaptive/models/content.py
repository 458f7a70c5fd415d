"""Digests of models, by which a run that is resumed or applied has the same one.

The digest of a file covers its bytes, and external weights of ONNX. The digest of a model
made in Python (a built-in name, a factory, a module) covers its operators, shapes and
types, not its weights: they may be drawn anew at each call, and no kernel depends on them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import TVM_VERSION, structure_key
from tvm_adaptive.errors import OtherModelError
from tvm_adaptive.models import Network
from tvm_adaptive.models.frontend import FORMATS
from tvm_adaptive.models.frontend.onnx_graph import external_files

logger = logging.getLogger(__name__)

# What to note where no digest was kept, or that of another version of TVM.
MODEL_ASSUMED = "the journal does not say which model it was: this one is assumed"
_NEW_RUN = "Start a new run in another --work-dir; the store has the records."
_READ_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Where a run's model comes from; the journal's ``"model"`` event holds these fields."""

    what: str | None  # file, factory or name; None for a module in Python
    input_shapes: dict[str, list[int]]  # as the user gave them, or as the user's arrays fix them
    content: str  # kind and digest of the model; empty where there is none
    # the file of the user's inputs; relative to the run's directory if the run keeps it there
    inputs: str | None = None

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of the journal's event."""
        return dataclasses.asdict(self)


def named_source(
    what: str,
    workload: Any,
    input_shapes: Mapping[str, Sequence[int]] | None,
    inputs: str | None = None,
) -> ModelSource:
    """Return the source of a model that the user named, with the file of the user's inputs."""
    shapes, path = _shapes(input_shapes), Path(what)
    if path.suffix in FORMATS:
        if inputs is not None and isinstance(workload, Network):  # they fix open extents
            shapes |= _shapes(workload.input_shapes)
        return ModelSource(str(path.absolute()), shapes, _content_of_file(path), inputs)
    mod = workload if isinstance(workload, Network) else workload.mod
    return ModelSource(what, shapes, content_of(mod), inputs)


def python_source(
    model: Any, input_shapes: Mapping[str, Sequence[int]] | None = None
) -> ModelSource:
    """Return the source of a module in Python."""
    return ModelSource(None, _shapes(input_shapes), content_of(model))


def content_of(model: Any) -> str:
    """Return kind and digest of a network or a module, without the values of its weights."""
    mod, facts = model, []
    if isinstance(model, Network):
        mod = model.mod
        weights = {
            name: [*map(int, value.shape), str(value.dtype)] for name, value in model.params.items()
        }
        facts = [_shapes(model.input_shapes), model.input_dtypes, weights]
    try:
        text = json.dumps([structure_key(mod), *facts], sort_keys=True)
    except Exception as error:  # TVM's hashing of what a user made
        logger.info("the model has no digest: %s", error)
        return ""
    # Another version of TVM may make other operators of the same model.
    return f"structure, TVM {TVM_VERSION}:{hashlib.sha256(text.encode()).hexdigest()}"


def check_same_model(
    before: Mapping[str, Any], now: ModelSource, work_dir: Path, fix: str = _NEW_RUN
) -> bool:
    """Say if a model is known to be a run's; raise OtherModelError, with a fix, if it is not."""
    kind, _, digest = str(before.get("content") or "").rpartition(":")
    kind_now, _, digest_now = now.content.rpartition(":")
    shapes, shapes_now = before.get("input_shapes", {}), now.input_shapes
    common = shapes.keys() & shapes_now.keys()  # arrays give shapes, too
    is_other = any(shapes[name] != shapes_now[name] for name in common)
    if kind == kind_now and digest != digest_now:
        change = "the file's content" if kind == "sha256" else "its operators, shapes or types"
    elif is_other or (shapes and shapes_now and not common):
        change = "its input shapes"
    else:
        return kind == kind_now and bool(digest)
    raise OtherModelError(
        f"The model {now.what or ''} is not the one that the run in {work_dir} started with: "
        f"{change} changed. {fix}"
    )


def _shapes(input_shapes: Mapping[str, Sequence[int]] | None) -> dict[str, list[int]]:
    return {name: [int(n) for n in shape] for name, shape in (input_shapes or {}).items()}


def _content_of_file(path: Path) -> str:
    """Return the digest of a file and the files that it names; empty if one is unreadable."""
    digest = hashlib.sha256()
    try:
        for each in (path, *_external_files(path)):
            with open(each, "rb") as file:
                while chunk := file.read(_READ_BYTES):
                    digest.update(chunk)
    except OSError as error:
        logger.info("the model has no digest: %s", error)
        return ""
    return f"sha256:{digest.hexdigest()}"


def _external_files(path: Path) -> list[Path]:
    """Return the files in which an ONNX model keeps its weights."""
    if path.suffix != ".onnx" or importlib.util.find_spec("onnx") is None:
        return []
    import onnx

    names = external_files(onnx.load(str(path), load_external_data=False))
    return [path.parent / name for name in names]
