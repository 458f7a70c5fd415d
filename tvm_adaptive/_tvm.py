"""The only door to TVM.

Every name of TVM that the package uses is bound here, so that one file changes when TVM
moves. Importing this module checks the installed versions first: a bad pair of
apache-tvm and apache-tvm-ffi does not fail with an exception, it ends the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from tvm_adaptive._versions import check_versions, installed_version

TVM_VERSION = installed_version("apache-tvm")
FFI_VERSION = installed_version("apache-tvm-ffi")
check_versions(TVM_VERSION, FFI_VERSION)

# ruff: noqa: E402, F401 - the versions are checked before TVM is touched; re-exported
import tvm
from tvm import IRModule, relax
from tvm.driver import build as build_tir
from tvm.ir import load_json, save_json
from tvm.ir.transform import PassContext
from tvm.ir.utils import derived_object as _derived_object
from tvm.relax import transform as relax_transform
from tvm.relax.frontend import nn
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.builder import Builder, BuilderInput, BuilderResult, PyBuilder
from tvm.s_tir.meta_schedule.cost_model import CostModel, PyCostModel
from tvm.s_tir.meta_schedule.database import Database, TuningRecord, Workload
from tvm.s_tir.meta_schedule.feature_extractor import PerStoreFeature
from tvm.s_tir.meta_schedule.measure_callback import MeasureCallback, PyMeasureCallback
from tvm.s_tir.meta_schedule.runner import (
    EvaluatorConfig,
    PyRunner,
    PyRunnerFuture,
    RPCConfig,
    Runner,
    RunnerInput,
    RunnerResult,
)
from tvm.s_tir.meta_schedule.runner.utils import alloc_argument_common
from tvm.s_tir.meta_schedule.search_strategy import (
    EvolutionarySearch,
    MeasureCandidate,
    PySearchStrategy,
    SearchStrategy,
)
from tvm.s_tir.meta_schedule.task_scheduler import PyTaskScheduler, TaskScheduler
from tvm.s_tir.meta_schedule.tune_context import TuneContext
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock
from tvm.target import Target
from tvm_ffi import structural_hash

_T = TypeVar("_T")

# An object of ours that has passed through C++ comes back as a bare wrapper of the base
# class, without its Python side. This table finds the Python side again by the address
# of the C++ object. Entries vanish with the object: it owns the Python side.
_python_sides: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def derived_object(cls: type[_T]) -> type[_T]:
    """Make a Python class usable by TVM's C++, as TVM's decorator of the same name does.

    Unlike with TVM's own, :func:`python_side` finds the instance again when C++ hands
    the object back. As with TVM's own, a decorated class can't be subclassed (inherit
    from ``Decorated._cls``).

    Parameters
    ----------
    cls : type
        A subclass of one of TVM's ``Py...`` classes.
    """
    derived: Any = _derived_object(cls)
    construct: Callable[..., None] = derived.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        _python_sides[handle(self)] = self._inst

    init.__wrapped__ = construct  # type: ignore[attr-defined]
    init.__doc__ = construct.__doc__
    derived.__init__ = init
    return derived  # type: ignore[no-any-return]


def handle(obj: Any) -> int:
    """Return the address of the C++ object behind a TVM object."""
    return int(obj.__chandle__())


def python_side(obj: Any) -> Any | None:
    """Return the Python instance behind an object of ours, or None for a stock object."""
    return _python_sides.get(handle(obj))


def exported(name: str) -> Callable[..., Any]:
    """Return a C++ function that MetaSchedule exports, by its short name.

    Parameters
    ----------
    name : str
        E.g. ``"SearchStrategyEvolutionarySearchSampleInitPopulation"``.

    Raises
    ------
    ValueError
        When this TVM does not export it.
    """
    function = tvm.get_global_func(f"s_tir.meta_schedule.{name}", allow_missing=True)
    if function is None:
        raise ValueError(
            f"TVM {TVM_VERSION} does not export s_tir.meta_schedule.{name}; "
            "use a version that README names."
        )
    return function  # type: ignore[no-any-return]


def sample_population(strategy: EvolutionarySearch, n: int) -> list[Schedule]:
    """Draw about ``n`` valid random schedules; the native initial sampling."""
    return list(exported("SearchStrategyEvolutionarySearchSampleInitPopulation")(strategy, n))


def evolve(strategy: EvolutionarySearch, population: list[Schedule], n: int) -> list[Schedule]:
    """Evolve natively; return up to ``n`` unmeasured schedules, best score first.

    The strategy remembers what it returned and never returns it again.
    """
    return list(
        exported("SearchStrategyEvolutionarySearchEvolveWithCostModel")(strategy, population, n)
    )
