"""Exit codes."""

from tvm_adaptive.tuning.interrupts import EXIT_INTERRUPTED

__all__ = ["EXIT_BAD_INPUT", "EXIT_BAD_RESULT", "EXIT_INTERRUPTED", "EXIT_OK"]

EXIT_OK = 0
EXIT_BAD_RESULT = 1
EXIT_BAD_INPUT = 2
