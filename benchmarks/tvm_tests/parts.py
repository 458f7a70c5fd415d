"""Parts of ours in the place of stock's, whether a test names them or makes them by their class."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tvm_adaptive._tvm import PerStoreFeature, ms
from tvm_adaptive.tuning import registry

# For each part, stock's names (its default first) and the names that take their place. The
# replays and the random model have no counterpart.
NAMES = {
    "cost_model": {"xgb": "rfei"},
    "strategy": {"evolutionary": "adaptive"},
    "runner": {"local": "adaptive", "rpc": "adaptive-rpc"},
    "builder": {"local": "persistent"},
    "task_scheduler": {"gradient": "dynatune", "round-robin": "adaptive-round-robin"},
}


def _search(*, eps_greedy: float | None = None, **options: Any) -> dict[str, Any]:
    """Translate stock's share of random candidates; other options have the same names."""
    return {"epsilon": eps_greedy, **options}


def _timing(*, evaluator_config: Any = None, **options: Any) -> dict[str, Any]:
    """Translate how to time: a stopping rule decides on numbers of runs and repeats."""
    if evaluator_config is None:
        return options
    return {
        "min_repeat_ms": float(evaluator_config.min_repeat_ms),
        "cpu_cache_flush": bool(evaluator_config.enable_cpu_cache_flush),
        **options,
    }


def _rpc(rpc_config: Any = None, evaluator_config: Any = None, **options: Any) -> dict[str, Any]:
    return {"rpc_config": rpc_config, **_timing(evaluator_config=evaluator_config, **options)}


def _forest(
    *,
    extractor: Any = None,
    num_warmup_samples: int = 100,
    adaptive_training: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Drop how boosted trees are trained; a forest has the features of stock's default."""
    del num_warmup_samples, adaptive_training
    if not isinstance(extractor, PerStoreFeature | None):
        raise TypeError(f"a forest takes no extractor {extractor}")
    return options


def _same(**options: Any) -> dict[str, Any]:
    return options


# Stock's classes: their module in MetaSchedule, the part and its name for NAMES, and how
# their arguments are translated. One that ours does not have is a TypeError.
CLASSES: dict[str, tuple[str, str, str, Callable[..., dict[str, Any]]]] = {
    "XGBModel": ("cost_model", "cost_model", "xgb", _forest),
    "EvolutionarySearch": ("search_strategy", "strategy", "evolutionary", _search),
    "LocalRunner": ("runner", "runner", "local", _timing),
    "RPCRunner": ("runner", "runner", "rpc", _rpc),
    "LocalBuilder": ("builder", "builder", "local", _same),
    "GradientBased": ("task_scheduler", "task_scheduler", "gradient", _same),
    "RoundRobin": ("task_scheduler", "task_scheduler", "round-robin", _same),
}


@contextlib.contextmanager
def ours_in_place(made: set[str]) -> Iterator[None]:
    """Let MetaSchedule's names and classes make parts of ours; ``made`` gets the parts made."""
    with contextlib.ExitStack() as stack:
        for part in NAMES:
            base = registry.PARTS[part].base
            _replace(stack, base, "create", staticmethod(_by_name(part, base, made)))
        for name, (module, part, kind, translate) in CLASSES.items():
            kind_of_ours = _by_class(name, part, NAMES[part][kind], translate, made)
            _replace(stack, getattr(ms, module), name, kind_of_ours)
        yield


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, owner.__dict__[name])
    setattr(owner, name, value)


def _by_name(part: str, base: Any, made: set[str]) -> Callable[..., Any]:
    stock, ours = base.create, NAMES[part]
    default = next(iter(ours))

    def create(kind: Any = default, *args: Any, **options: Any) -> Any:
        if not isinstance(kind, str) or kind not in ours:
            return stock(kind, *args, **options)
        made.add(part)
        return registry.create(part, ours[kind], **options)

    return create


def _by_class(
    name: str, part: str, ours: str, translate: Callable[..., dict[str, Any]], made: set[str]
) -> type:
    """Return a class whose objects are ours; TVM also asks whether objects are its instances."""

    def make(_: type, *args: Any, **options: Any) -> Any:
        made.add(part)
        return registry.create(part, ours, **translate(*args, **options))

    return type(name, (), {"__new__": make})
