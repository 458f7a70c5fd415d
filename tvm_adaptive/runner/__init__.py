"""Measure candidates, each only as long as its time is in doubt."""

from tvm_adaptive.runner.evaluator import evaluate
from tvm_adaptive.runner.local import AdaptiveRunner
from tvm_adaptive.runner.rpc.runner import AdaptiveRPCRunner
from tvm_adaptive.runner.stopping import CVRule, PaperRule, PrecisionRule, StoppingRule, make_rule
from tvm_adaptive.runner.summary import Summary, summarize

__all__ = [
    "AdaptiveRPCRunner",
    "AdaptiveRunner",
    "CVRule",
    "PaperRule",
    "PrecisionRule",
    "StoppingRule",
    "Summary",
    "evaluate",
    "make_rule",
    "summarize",
]
