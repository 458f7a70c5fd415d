"""Names for strings: what makes ``cost_model="rfei"`` work in stock MetaSchedule.

MetaSchedule turns names into objects with static ``create`` methods that know a closed
list. :func:`register` puts a look-up of our names before each of them; everything else,
unknown names included, still reaches TVM's own code.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from tvm_adaptive._tvm import (
    Builder,
    CostModel,
    Runner,
    SearchStrategy,
    Target,
    TaskScheduler,
    module_pass,
    ms,
    relax_transform,
)

Constructor = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """One replaceable part of MetaSchedule, and the names that we add to it.

    Attributes
    ----------
    base : type
        TVM's class whose ``create`` takes a name.
    constructors : dict of str to callable
        Called with the keywords that ``create`` got.
    """

    base: type
    constructors: dict[str, Constructor]


def _rfei(*, num_tuning_cores: int | None = None, tree_method: str = "auto", **options: Any) -> Any:
    """Make the forest; ``tree_method`` is xgboost's and means nothing to it."""
    del tree_method
    from tvm_adaptive.cost_model import RFEICostModel

    if num_tuning_cores is not None:
        options.setdefault("n_jobs", num_tuning_cores)
    return RFEICostModel(**options)


def _rfei_family(
    *, num_tuning_cores: int | None = None, tree_method: str = "auto", **options: Any
) -> Any:
    del tree_method
    from tvm_adaptive.cost_model.family_model import RFEIFamilyCostModel

    if num_tuning_cores is not None:
        options.setdefault("n_jobs", num_tuning_cores)
    return RFEIFamilyCostModel(**options)


def _search(**options: Any) -> Any:
    from tvm_adaptive.search_strategy import AdaptiveSearch

    return AdaptiveSearch(**options)


def _local_runner(*, max_workers: int | None = None, **options: Any) -> Any:
    """Make the local runner; one kernel is timed at a time, so it wants no workers."""
    del max_workers
    from tvm_adaptive.runner import AdaptiveRunner

    return AdaptiveRunner(**options)


def _rpc_runner(*, max_workers: int | None = None, **options: Any) -> Any:
    """Make the RPC runner; MetaSchedule hands over this host's cores, not the boards."""
    del max_workers
    from tvm_adaptive.runner import AdaptiveRPCRunner

    return AdaptiveRPCRunner(**options)


def _builder(**options: Any) -> Any:
    from tvm_adaptive.builder import PersistentBuilder

    return PersistentBuilder(**options)


def _scheduler(policy: str) -> Constructor:
    def make(*, preset: str | None = None, **options: Any) -> Any:
        from tvm_adaptive.task_scheduler import AdaptiveScheduler

        # A preset says which DynaTune is meant; the baselines have none.
        name = preset or "default" if policy == "dynatune" else policy
        return AdaptiveScheduler(name, **options)

    return make


_POLICIES = {name: name for name in ("dynatune", "random", "linear", "epsilon-greedy", "softmax")}
# "round-robin" and "gradient" stay stock's.
_POLICIES["adaptive-round-robin"] = "round-robin"
_POLICIES["adaptive-gradient"] = "gradient"

PARTS: dict[str, Part] = {
    "cost_model": Part(CostModel, {"rfei": _rfei, "rfei-family": _rfei_family}),
    "strategy": Part(SearchStrategy, {"adaptive": _search}),
    "runner": Part(Runner, {"adaptive": _local_runner, "adaptive-rpc": _rpc_runner}),
    "builder": Part(Builder, {"persistent": _builder}),
    "task_scheduler": Part(
        TaskScheduler, {name: _scheduler(policy) for name, policy in _POLICIES.items()}
    ),
}
STOCK_NAMES: dict[str, tuple[str, ...]] = {
    "cost_model": ("xgb", "mlp", "random"),
    "strategy": ("evolutionary", "replay-trace", "replay-func"),
    "runner": ("local", "rpc"),
    "builder": ("local",),
    "task_scheduler": ("gradient", "round-robin"),
}


def names(part: str) -> list[str]:
    """Return every name that a part understands, ours first."""
    return [*PARTS[part].constructors, *STOCK_NAMES[part]]


def create(part: str, name: str, **options: Any) -> Any:
    """Construct one of our parts by name.

    Parameters
    ----------
    part : str
        ``"cost_model"``, ``"strategy"``, ``"runner"``, ``"builder"`` or
        ``"task_scheduler"``.
    name : str
    **options : Any
        Passed to the constructor.

    Raises
    ------
    KeyError
        When the name is not ours.
    """
    return PARTS[part].constructors[name](**options)


def register() -> None:
    """Make our names work in stock MetaSchedule; calling it again changes nothing."""
    for part in PARTS.values():
        stock = part.base.__dict__["create"].__func__
        if not hasattr(stock, "_tvm_adaptive_stock"):
            part.base.create = staticmethod(_with_our_names(stock, part.constructors))  # type: ignore[attr-defined]
    stock_pass = relax_transform.MetaScheduleTuneIRMod
    if not hasattr(stock_pass, "_tvm_adaptive_stock"):
        relax_transform.MetaScheduleTuneIRMod = _with_parts(stock_pass)


def unregister() -> None:
    """Give MetaSchedule its own look-ups back; calling it again changes nothing."""
    for part in PARTS.values():
        current = part.base.__dict__["create"].__func__
        stock = getattr(current, "_tvm_adaptive_stock", current)
        part.base.create = staticmethod(stock)  # type: ignore[attr-defined]
    current = relax_transform.MetaScheduleTuneIRMod
    relax_transform.MetaScheduleTuneIRMod = getattr(current, "_tvm_adaptive_stock", current)


def _with_our_names(stock: Constructor, ours: dict[str, Constructor]) -> Constructor:
    @functools.wraps(stock)
    def create_by_name(*args: Any, **kwargs: Any) -> Any:
        kind = args[0] if args else kwargs.get("kind")
        if isinstance(kind, str) and kind in ours:
            options = {key: value for key, value in kwargs.items() if key != "kind"}
            return ours[kind](*args[1:], **options)
        return stock(*args, **kwargs)

    create_by_name._tvm_adaptive_stock = stock  # type: ignore[attr-defined]
    return create_by_name


def _with_parts(stock: Constructor) -> Constructor:
    """Let the tuning pass take the parts that ``tune_relax`` takes.

    The stock pass has no way to name them: its C++ half passes on trial counts only.
    """

    @functools.wraps(stock)
    def tune_ir_mod(
        params: dict[str, Any],
        work_dir: str,
        max_trials_global: int,
        max_trials_per_task: int | None = None,
        op_names: list[str] | None = None,
        **parts: Any,
    ) -> Any:
        if not parts:
            return stock(params, work_dir, max_trials_global, max_trials_per_task, op_names)

        def tune(mod: Any, _context: Any) -> Any:
            ms.relax_integration.tune_relax(
                mod,
                params,
                Target.current(allow_none=False),
                work_dir,
                max_trials_global,
                max_trials_per_task,
                op_names,
                **parts,
            )
            return mod

        return module_pass(tune, opt_level=0, name="MetaScheduleTuneIRMod")

    tune_ir_mod._tvm_adaptive_stock = stock  # type: ignore[attr-defined]
    return tune_ir_mod
