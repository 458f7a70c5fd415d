from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np

from tvm_adaptive import _tvm


@_tvm.derived_object
class Remembering(_tvm.PyCostModel):
    """A cost model that keeps what its constructor was given."""

    def __init__(self, *, note: str = "none") -> None:
        super().__init__()
        self.note = note

    def load(self, path: str) -> None:
        self.note = path

    def save(self, path: str) -> None:
        self.note = path

    def update(self, context: Any, candidates: Any, results: Any) -> None:
        self.note = "updated"

    def predict(self, context: Any, candidates: list[Any]) -> np.ndarray:
        return np.arange(len(candidates), dtype="float64")


@_tvm.derived_object
class IdleBuilder(_tvm.PyBuilder):
    def build(self, build_inputs: Any) -> list[Any]:
        return []


@_tvm.derived_object
class IdleRunner(_tvm.PyRunner):
    def run(self, runner_inputs: Any) -> list[Any]:
        return []


def through_cpp(obj: Any) -> Any:
    scheduler = _tvm.ms.task_scheduler.RoundRobin()
    database = _tvm.ms.database.MemoryDatabase()
    scheduler.tune([], [], 0, 0, 1, IdleBuilder(), IdleRunner(), [], database, obj)
    return scheduler.cost_model_


def test_the_python_side_comes_back_from_cpp() -> None:
    model = Remembering(note="mine")
    returned = through_cpp(model)
    assert not isinstance(returned, Remembering)
    side = _tvm.python_side(returned)
    assert side is _tvm.python_side(model)
    assert side.note == "mine"


def test_cpp_calls_reach_the_python_side() -> None:
    model = Remembering()
    returned = through_cpp(model)
    returned.load("somewhere")
    assert _tvm.python_side(model).note == "somewhere"
    returned.save("elsewhere")
    assert _tvm.python_side(model).note == "elsewhere"


def test_a_stock_object_has_no_python_side() -> None:
    assert _tvm.python_side(_tvm.ms.builder.Builder.create("local", max_workers=1)) is None


def test_the_python_side_vanishes_with_the_object() -> None:
    model = Remembering()
    address = _tvm.handle(model)
    side = weakref.ref(_tvm.python_side(model))
    assert address in _tvm._python_sides
    del model
    gc.collect()
    assert side() is None
    assert address not in _tvm._python_sides


def test_two_objects_are_kept_apart() -> None:
    first, second = Remembering(note="first"), Remembering(note="second")
    assert _tvm.python_side(first).note == "first"
    assert _tvm.python_side(second).note == "second"


def test_exported_finds_what_the_search_needs() -> None:
    assert callable(_tvm.exported("SearchStrategyEvolutionarySearchEvolveWithCostModel"))


def test_tasks_are_called_as_files_may_be() -> None:
    function = _tvm.te_workload("GMM")["main"]
    mod = _tvm.IRModule(dict.fromkeys(("a/b", "a_b", "[/x]", "main"), function))
    tasks = _tvm.functions_as_tasks(mod, _tvm.Target({"kind": "llvm", "num-cores": 1}))
    assert [str(task.task_name) for task in tasks] == ["[_x]", "a_b", "a_b_", "main"]
