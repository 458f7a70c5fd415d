"""Networks to tune: built-in ones, their preparation, compilation and comparison."""

from tvm_adaptive.models.builtin.bert import bert_base
from tvm_adaptive.models.builtin.catalog import BUILTIN, TIRWorkload, load_workload
from tvm_adaptive.models.builtin.encoder import transformer
from tvm_adaptive.models.builtin.mobilenet import mobilenet_v2
from tvm_adaptive.models.builtin.resnet import resnet18, resnet34, resnet50
from tvm_adaptive.models.builtin.squeezenet import squeezenet1_1
from tvm_adaptive.models.builtin.vgg import vgg16
from tvm_adaptive.models.compare import (
    export,
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
from tvm_adaptive.values.agreement import Difference, largest_difference, outputs_agree

__all__ = [
    "BUILTIN",
    "Compiled",
    "Coverage",
    "Difference",
    "Network",
    "Prepared",
    "TIRWorkload",
    "bert_base",
    "call_counts",
    "compile_network",
    "compile_tir",
    "constant_only_calls",
    "export",
    "extract",
    "is_gpu",
    "largest_difference",
    "load_workload",
    "mobilenet_v2",
    "outputs_agree",
    "prepare",
    "resnet18",
    "resnet34",
    "resnet50",
    "run_exported",
    "run_network",
    "squeezenet1_1",
    "time_exported",
    "time_network",
    "transformer",
    "try_exported",
    "vgg16",
]
