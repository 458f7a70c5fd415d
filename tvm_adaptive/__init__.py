"""Adaptive auto-tuning for Apache TVM's MetaSchedule.

Importing this package makes its names (``"rfei"``, ``"adaptive"``, ``"adaptive-rpc"``,
``"persistent"``, ``"dynatune"``) work as strings in MetaSchedule's own functions;
:func:`unregister` takes them back.
"""

from tvm_adaptive._versions import installed_version
from tvm_adaptive.builder import PersistentBuilder
from tvm_adaptive.config import TuneConfig
from tvm_adaptive.cost_model import RFEICostModel
from tvm_adaptive.registry import register, unregister
from tvm_adaptive.runner import AdaptiveRPCRunner, AdaptiveRunner
from tvm_adaptive.search_strategy import AdaptiveSearch
from tvm_adaptive.task_scheduler import AdaptiveScheduler
from tvm_adaptive.tune import tune, tune_relax, tune_tir

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
    "register",
    "tune",
    "tune_relax",
    "tune_tir",
    "unregister",
]

register()
