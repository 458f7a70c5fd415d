"""What the tests of a run's checks share."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from benchmarks.faults.injection import without_bodies
from tests.database.conftest import make_record
from tests.tuning.observers import Notes
from tvm_adaptive._tvm import (
    Database,
    IRModule,
    copy_record,
    memory_database,
)
from tvm_adaptive.errors import (
    WorkerDiedError,
)
from tvm_adaptive.models import Network, extract, prepare
from tvm_adaptive.models.frontend import load
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.session import RunOptions, Session, open_session
from tvm_adaptive.workers.pool import Outcome

# Workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Clock:
    """Stands still until a test sets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def hang(*_args: Any, **_options: Any) -> None:
    time.sleep(1000.0)


def die(*_args: Any, **_options: Any) -> None:
    os._exit(5)


def spend_all_on_compiling(check: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the time of a thousand seconds be over when a check has compiled."""
    compiled = check._compile

    def slowly(*args: Any) -> Any:
        found = compiled(*args)
        clock.now = 999.9
        return found

    monkeypatch.setattr(check, "_compile", slowly)


@contextlib.contextmanager
def session_in(
    folder: Path,
    budget: Budget,
    observer: Notes | None = None,
    peer_list: str = "",
    *,
    resume: bool = False,
) -> Iterator[Session]:
    options = RunOptions(
        what="net",
        work_dir=folder,
        budget_sec=budget.seconds,
        trials=1,
        seed=0,
        config=DEFAULT.replace(store="none", peers=peer_list),
        observer=observer or Notes(),
        resume=resume,
    )
    with open_session(options, budget=budget) as session:
        yield session


def tuned(network: Network, session: Session) -> tuple[Any, Database]:
    """Return a network and a record of one of its functions."""
    prepared = prepare(network, session.target)
    database = memory_database()
    mod = extract(prepared, session.target)[0].dispatched[0]
    copy_record(make_record(mod, session.target, 1e-3), database)
    return prepared, database


def onnx_network(folder: Path) -> Network:
    """Return a small ONNX model."""
    onnx = pytest.importorskip("onnx")
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = np.random.default_rng(0).standard_normal((64, 32)).astype("float32")
    nodes = [make.make_node("MatMul", ["x", "w"], ["z"]), make.make_node("Relu", ["z"], ["y"])]
    ends = [
        [make.make_tensor_value_info(name, kind, shape)]
        for name, shape in (("x", [16, 64]), ("y", [16, 32]))
    ]
    weights = [onnx.numpy_helper.from_array(weight, "w")]
    graph = make.make_graph(nodes, "net", *ends, weights)
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, str(folder / "net.onnx"))
    found = load(str(folder / "net.onnx"))
    assert isinstance(found, Network)
    return found


def idle(function: Any, name: str) -> Any:
    (found,) = without_bodies(IRModule({name: function})).functions.values()
    return found


class Answer:
    """A pool that gives an answer."""

    def __init__(self, value: Any = None, error: WorkerDiedError | None = None) -> None:
        self.outcomes = [Outcome(value, error)]
        self.limits_sec: list[float] = []

    def map(self, _function: Any, _jobs: Any, limit_sec: float) -> list[Any]:
        self.limits_sec.append(limit_sec)
        return self.outcomes
