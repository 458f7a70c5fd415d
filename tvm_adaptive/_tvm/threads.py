"""The size and place of TVM's pool of threads."""

from __future__ import annotations

import os

from tvm_adaptive._tvm import tvm


def share_threads(n_threads: int) -> None:
    """Start this thread's pool with so many threads, which may run on all its processors."""
    # threading_backend.h: kSpecifyThreadShareAllCore. TVM binds the calling thread, too: to
    # the processors that it may run on already.
    mode, processors = -3, [str(each) for each in sorted(os.sched_getaffinity(0))]
    configure = tvm.get_global_func("runtime.config_threadpool")
    # The first call makes as many threads as it names processors; the second frees them.
    configure(mode, n_threads, processors[:n_threads])
    configure(mode, n_threads, processors)
