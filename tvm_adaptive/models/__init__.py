"""Networks to tune: built-in ones, their preparation, compilation and comparison."""

from tvm_adaptive.models.builtin import BUILTIN, TIRWorkload, load_workload
from tvm_adaptive.models.compare import (
    Difference,
    export,
    largest_difference,
    outputs_agree,
    run_exported,
    run_network,
    time_exported,
    time_network,
    try_exported,
)
from tvm_adaptive.models.compile import Compiled, Coverage, compile_network, compile_tir
from tvm_adaptive.models.network import Network
from tvm_adaptive.models.prepare import (
    Prepared,
    call_counts,
    constant_only_calls,
    extract,
    is_gpu,
    prepare,
)
from tvm_adaptive.models.resnet import resnet18

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
    "constant_only_calls",
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
    "time_exported",
    "time_network",
    "try_exported",
]
