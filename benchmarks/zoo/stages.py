"""Take one model of the zoo through all stages: export, import, prepare, compile, compare."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.zoo.catalog import FILE, Model, file_in_package
from tvm_adaptive._tvm import Target
from tvm_adaptive.errors import AdaptiveError, summary_line
from tvm_adaptive.models import (
    Network,
    call_counts,
    compile_network,
    largest_difference,
    prepare,
    run_network,
)
from tvm_adaptive.models.frontend import load
from tvm_adaptive.models.frontend.onnx_file import open_session
from tvm_adaptive.tuning.config import TuneConfig
from tvm_adaptive.tuning.target import resolve_target

# A smaller spread of outputs, as a share of their size, is rounding.
_CONSTANT = 1e-5
_SHOWN = 600


class _Stages:
    """The stages of one model: their seconds, and the one that is under way."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.now = ""
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.now = name
        self._tell(name)
        start_sec = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start_sec, 2)


def take(model: Model, way: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """Take a model through all stages, and tell each before it begins; return its row."""
    stages = _Stages(tell)
    row: dict[str, Any] = {**_version(model), "agrees": False, "max_error": None}
    with tempfile.TemporaryDirectory() as folder:
        try:
            with stages.stage("export"):
                path, shapes = file_of(model, way, Path(folder))
            row |= _compared(path, shapes, stages, _target(model))
        except Exception as error:
            kind = "" if isinstance(error, AdaptiveError) else f"{type(error).__name__}: "
            text = str(error) if not kind else summary_line(error)
            row["message"] = (kind + text).replace(folder, "")[:_SHOWN]
            if stages.now != "export":
                row["message"] = row["message"].replace(f"{path.parent}/", "")
                row["framework_runs"] = _framework_runs(path, shapes)
    return {**row, "stage": stages.now, "seconds": stages.seconds}


def _version(model: Model) -> dict[str, str]:
    names = importlib.metadata.packages_distributions().get(model.package)
    if not names:  # what takes the model says how to install it
        return {}
    return {"version": f"{names[0]} {importlib.metadata.version(names[0])}"}


def file_of(model: Model, way: str, folder: Path) -> tuple[Path, dict[str, tuple[int, ...]]]:
    """Return a model's file, which is exported if no package ships it, and its open shapes."""
    if way == FILE:
        return file_in_package(model.package, model.file), model.shapes
    from benchmarks.zoo.modules import export, make

    return export(make(model), way, folder)


def _compared(
    path: Path, shapes: dict[str, tuple[int, ...]], stages: _Stages, target: Target
) -> dict[str, Any]:
    with stages.stage("import"):
        network = load(str(path), shapes)
    assert isinstance(network, Network)
    assert network.original is not None
    with contextlib.closing(network.original):
        with stages.stage("framework"):
            inputs = network.inputs()
            try:
                expected = network.original.run(inputs)
            except Exception as error:  # of any kind; such a model is not counted
                return {"message": summary_line(error), "framework_runs": False}
        with stages.stage("prepare"):
            prepared = prepare(network, target)
        with stages.stage("compile"):
            compiled = compile_network(prepared, None, target)
        with stages.stage("run"):
            outputs = run_network(compiled, inputs)
    with stages.stage("compare"):
        difference = largest_difference(outputs, expected)
        rtol = TuneConfig().finish.rtol
        problem = network.problem_beside_framework(outputs, expected, rtol)
    return {
        "agrees": problem is None,
        "max_error": difference.max_abs,
        "size": max(float(np.abs(each).max(initial=0.0)) for each in expected),
        # Equal numbers everywhere would agree after many an error, too.
        "is_constant": all(_is_constant(each) for each in expected),
        "functions": len(call_counts(prepared.mod)),
        "layout": prepared.layout,
        "framework": network.original.framework,
        "framework_runs": True,
        "message": problem or "",
    }


def _target(model: Model) -> Target:
    """Return this machine without LLVM's optimisations, which take more than all the rest."""
    optimised = resolve_target("cpu")
    if model.is_large:
        return optimised
    attributes = optimised.attrs
    cores = int(attributes["num-cores"])
    found = {"kind": "llvm", "mcpu": str(attributes["mcpu"]), "num-cores": cores, "opt-level": 0}
    return resolve_target(json.dumps(found))


def _is_constant(output: Any) -> bool:
    values = output.astype("float64")
    spread = float(np.ptp(values)) if values.size else 0.0
    return spread <= _CONSTANT * float(np.abs(values).max(initial=0.0))


def _framework_runs(path: Path, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Say whether the framework accepts a model that was not imported."""
    if path.suffix != ".onnx":
        return True  # torch has just exported it
    import onnxruntime

    with contextlib.suppress(Exception):  # ONNX Runtime's own
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        inputs = []
        for info in session.get_inputs():
            kind = {"float": "float32", "double": "float64"}.get(info.type[7:-1], info.type[7:-1])
            inputs.append(np.zeros(shapes.get(info.name, shapes.get("", info.shape)), kind))
        open_session(path, inputs, None).run()
        return True
    return False
