"""What a model is, in a few characters: whether a run that goes on is given the same one.

A file is told by its bytes, external weights of ONNX included. What Python makes (a
built-in name, a factory, a module) is told by its operators, shapes and types, not by its
weights: they may be drawn anew at each call, and no kernel depends on their values.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import TVM_VERSION, structure_key
from tvm_adaptive.errors import OtherModelError
from tvm_adaptive.models import Network
from tvm_adaptive.models.frontend import FORMATS

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Where a run's model comes from, for its journal."""

    what: str | None  # file, factory or name; None for a module that was given in Python
    input_shapes: dict[str, list[int]]  # as they were given
    content: str  # kind and digest of the model; empty where it is not known

    def as_fields(self) -> dict[str, Any]:
        """Return what a journal's ``"model"`` event holds of it."""
        return dataclasses.asdict(self)


def named_source(
    what: str, workload: Any, input_shapes: Mapping[str, Sequence[int]] | None
) -> ModelSource:
    """Return the source of a model that was given by its name."""
    shapes = _shapes(input_shapes)
    path = Path(what)
    if path.suffix in FORMATS:
        return ModelSource(str(path.resolve()), shapes, _content_of_file(path))
    mod = workload if isinstance(workload, Network) else workload.mod
    return ModelSource(what, shapes, content_of(mod))


def python_source(
    model: Any, input_shapes: Mapping[str, Sequence[int]] | None = None
) -> ModelSource:
    """Return the source of a model that was given in Python."""
    return ModelSource(None, _shapes(input_shapes), content_of(model))


def content_of(model: Any) -> str:
    """Return what tells a network or a module from another one, but for its weights."""
    facts: list[Any] = []
    mod = model
    if isinstance(model, Network):
        mod = model.mod
        facts = [
            {name: [*map(int, shape)] for name, shape in model.input_shapes.items()},
            model.input_dtypes,
            {
                name: [*map(int, value.shape), str(value.dtype)]
                for name, value in model.params.items()
            },
        ]
    try:
        text = json.dumps([structure_key(mod), *facts], sort_keys=True)
    except Exception as error:  # TVM's hashing of what a user made
        logger.info("the model cannot be told from another one: %s", error)
        return ""
    # Another version of TVM may make other operators of the same model.
    return f"structure, TVM {TVM_VERSION}:{hashlib.sha256(text.encode()).hexdigest()}"


def check_same_model(before: Mapping[str, Any], now: ModelSource, work_dir: Path) -> bool:
    """Compare a resumed run's model with the one that it was begun with."""
    kind, _, digest = str(before.get("content") or "").rpartition(":")
    kind_now, _, digest_now = now.content.rpartition(":")
    shapes = before.get("input_shapes", now.input_shapes)
    if kind == kind_now and digest == digest_now and shapes == now.input_shapes:
        return bool(digest)
    differs = "its input shapes" if shapes != now.input_shapes else ""
    if kind == kind_now and digest != digest_now:
        differs = "the file's content" if kind == "sha256" else "its operators, shapes or types"
    if not differs:
        return False
    raise OtherModelError(
        f"The model {now.what or ''} is not the one that the run in {work_dir} was begun with: "
        f"{differs} changed; begin anew in another --work-dir, the store knows the records."
    )


def _shapes(input_shapes: Mapping[str, Sequence[int]] | None) -> dict[str, list[int]]:
    return {name: [int(n) for n in shape] for name, shape in (input_shapes or {}).items()}


def _content_of_file(path: Path) -> str:
    """Return the digest of a file, and of those that it names; empty if one cannot be read."""
    digest = hashlib.sha256()
    try:
        for each in (path, *_external_files(path)):
            with open(each, "rb") as file:
                while chunk := file.read(_READ_BYTES):
                    digest.update(chunk)
    except OSError as error:
        logger.info("the model cannot be told from another one: %s", error)
        return ""
    return f"sha256:{digest.hexdigest()}"


def _external_files(path: Path) -> list[Path]:
    """Return the files in which an ONNX model keeps its weights."""
    if path.suffix != ".onnx" or importlib.util.find_spec("onnx") is None:
        return []
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    names = {
        entry.value
        for tensor in _tensors(graph)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return [path.parent / name for name in sorted(names)]


def _tensors(graph: Any) -> Iterator[Any]:
    """Yield the weights of an ONNX graph, and of those inside it."""
    yield from graph.initializer
    for attribute in (each for node in graph.node for each in node.attribute):
        yield from (attribute.t, *attribute.tensors)
        for inner in (attribute.g, *attribute.graphs):
            if inner.node or inner.initializer:
                yield from _tensors(inner)
