"""Names for strings: what makes ``cost_model="rfei"`` work in stock MetaSchedule.

MetaSchedule turns names into objects with static ``create`` methods that know a closed
list. :func:`register` puts a look-up of our names before each of them; every other name
still reaches TVM's own code.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
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
from tvm_adaptive.builder import PersistentBuilder
from tvm_adaptive.cost_model import RFEICostModel, RFEIFamilyCostModel
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.runner import AdaptiveRPCRunner, AdaptiveRunner
from tvm_adaptive.search_strategy import AdaptiveSearch
from tvm_adaptive.task_scheduler import AdaptiveScheduler
from tvm_adaptive.tuning.config import TuneConfig

Constructor = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """One replaceable part of MetaSchedule, and the names that we add to it."""

    base: type  # TVM's class whose ``create`` takes a name
    constructors: dict[str, Constructor]  # called with the keywords that ``create`` got


# Of parts that are made by name: the seed that MetaSchedule's functions take reaches searches
# alone, and equal calls are to search alike, as with stock's parts.
_SEED = 0


def _forest(
    kind: Constructor,
    *,
    num_tuning_cores: int | None = None,
    tree_method: str = "auto",
    **options: Any,
) -> Any:
    """Construct a forest; ``tree_method`` is xgboost's and means nothing to it."""
    del tree_method
    if num_tuning_cores is not None:
        options.setdefault("n_jobs", num_tuning_cores)
    options.setdefault("seed", _SEED)
    return kind(**options)


def _runner(kind: Constructor, *, max_workers: int | None = None, **options: Any) -> Any:
    """Construct a runner; ``max_workers`` are this host's cores, which do not measure."""
    del max_workers
    return kind(**options)


def _scheduler(policy: str, *, preset: str | None = None, **options: Any) -> Any:
    options.setdefault("seed", _SEED)
    # A preset says which DynaTune is meant; the baselines have none.
    return AdaptiveScheduler(preset or "default" if policy == "dynatune" else policy, **options)


_POLICIES = {name: name for name in ("dynatune", "random", "linear", "epsilon-greedy", "softmax")}
# "round-robin" and "gradient" stay stock's.
_POLICIES["adaptive-round-robin"] = "round-robin"
_POLICIES["adaptive-gradient"] = "gradient"

PARTS: dict[str, Part] = {
    "cost_model": Part(
        CostModel,
        {
            "rfei": partial(_forest, RFEICostModel),
            "rfei-family": partial(_forest, RFEIFamilyCostModel),
        },
    ),
    "strategy": Part(SearchStrategy, {"adaptive": AdaptiveSearch}),
    "runner": Part(
        Runner,
        {
            "adaptive": partial(_runner, AdaptiveRunner),
            "adaptive-rpc": partial(_runner, AdaptiveRPCRunner),
        },
    ),
    "builder": Part(Builder, {"persistent": PersistentBuilder}),
    "task_scheduler": Part(
        TaskScheduler, {name: partial(_scheduler, policy) for name, policy in _POLICIES.items()}
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


def check_names(config: TuneConfig) -> None:
    """Raise InvalidOptionError unless every part of a configuration has a known name."""
    for part in PARTS:
        name = getattr(config, part)
        if name not in names(part):
            raise InvalidOptionError(
                f"Unknown {part.replace('_', ' ')} {name!r}; possible are {', '.join(names(part))}."
            )


def create(part: str, name: str, **options: Any) -> Any:
    """Construct one of our parts by its key in ``PARTS`` and its name; KeyError if not ours."""
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
    """Restore MetaSchedule's own look-ups; calling it again changes nothing."""
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
    """Let the tuning pass take the parts that ``tune_relax`` takes; stock's takes none."""

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
