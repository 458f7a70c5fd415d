"""Measure candidates, each only as long as its time is in doubt."""

from tvm_adaptive.runner.local import AdaptiveRunner
from tvm_adaptive.runner.rpc.runner import AdaptiveRPCRunner

__all__ = ["AdaptiveRPCRunner", "AdaptiveRunner"]
