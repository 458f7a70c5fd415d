"""Adaptive auto-tuning for Apache TVM's MetaSchedule.

Importing this package makes its names (``"rfei"``, ``"adaptive"``, ``"adaptive-rpc"``,
``"persistent"``, ``"dynatune"``) work as strings in MetaSchedule's own functions;
:func:`unregister` takes them back.
"""

from tvm_adaptive.workers.early_start import early_start

with early_start():
    from tvm_adaptive._tvm.versions import installed_version
    from tvm_adaptive.builder import PersistentBuilder
    from tvm_adaptive.cost_model import RFEICostModel
    from tvm_adaptive.runner import AdaptiveRPCRunner, AdaptiveRunner
    from tvm_adaptive.search_strategy import AdaptiveSearch
    from tvm_adaptive.task_scheduler import AdaptiveScheduler
    from tvm_adaptive.tuning.config import TuneConfig
    from tvm_adaptive.tuning.embedding import compile_model as compile  # noqa: A004
    from tvm_adaptive.tuning.registry import register, unregister
    from tvm_adaptive.tuning.tune import tune, tune_relax, tune_tir
    from tvm_adaptive.values.moved import keep_former_names

__version__ = installed_version("tvm-adaptive") or "unknown"

__all__ = [
    "AdaptiveRPCRunner",
    "AdaptiveRunner",
    "AdaptiveScheduler",
    "AdaptiveSearch",
    "PersistentBuilder",
    "RFEICostModel",
    "TuneConfig",
    "__version__",
    "compile",
    "register",
    "tune",
    "tune_relax",
    "tune_tir",
    "unregister",
]

register()
keep_former_names()
