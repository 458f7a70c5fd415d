"""The task scheduler: which task is tuned next, and for how long."""

from tvm_adaptive.task_scheduler.scheduler import AdaptiveScheduler

__all__ = ["AdaptiveScheduler"]
