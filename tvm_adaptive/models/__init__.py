"""Networks to tune: built-in ones, their preparation, compilation and comparison."""

from tvm_adaptive._tvm import is_gpu
from tvm_adaptive.models.builtin.catalog import BUILTIN, TIRWorkload, load_workload
from tvm_adaptive.models.builtin.encoder import transformer
from tvm_adaptive.models.builtin.resnet import resnet18
from tvm_adaptive.models.compile import Compiled, Coverage, compile_network, compile_tir, export
from tvm_adaptive.models.network import Network
from tvm_adaptive.models.prepare import (
    Prepared,
    call_counts,
    extract,
    prepare,
    tunable_counts,
)
from tvm_adaptive.models.run import run_exported, run_network, try_exported
from tvm_adaptive.values.agreement import Difference, largest_difference, outputs_agree

__all__ = [
    "BUILTIN",
    "Compiled",
    "Coverage",
    "Difference",
    "Network",
    "Prepared",
    "TIRWorkload",
    "call_counts",
    "compile_network",
    "compile_tir",
    "export",
    "extract",
    "is_gpu",
    "largest_difference",
    "load_workload",
    "outputs_agree",
    "prepare",
    "resnet18",
    "run_exported",
    "run_network",
    "transformer",
    "try_exported",
    "tunable_counts",
]
