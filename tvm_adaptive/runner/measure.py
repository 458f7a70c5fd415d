"""What runs inside a measuring worker: load an artifact, fill its arguments, time it."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    RPCConfig,
    alloc_argument_common,
    device,
    load_module,
    start_thread_pool,
    tvm,
)
from tvm_adaptive.cores import take_free_core
from tvm_adaptive.errors import AdaptiveError
from tvm_adaptive.records import Timing
from tvm_adaptive.runner.evaluator import Timer, evaluate
from tvm_adaptive.runner.racing import Race
from tvm_adaptive.runner.stopping import StoppingRule

RANDOM_FILL = "tvm.contrib.random.random_fill_for_measure"
CPU_CACHE_FLUSH = "cache_flush_cpu_non_first_arg"
# How often a worker that waits for a device or for a server looks at the tracker again.
TRACKER_POLL_SEC = 1.0
# A tracker answers within milliseconds; this much allows for a slow network.
CONNECT_TIMEOUT_SEC = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """How to measure; the same for every candidate of a runner.

    Attributes
    ----------
    rule : StoppingRule
    min_repeat_ms : float
        See :func:`~tvm_adaptive.runner.evaluator.evaluate`, also for ``max_sec``.
    max_sec : float or None
    device_index : int
    cpu_cache_flush : bool
        Flush the CPU's caches before each micro-batch, which then is a single run.
    race : Race or None
        Against the fastest known candidate of the task.
    """

    rule: StoppingRule
    min_repeat_ms: float = 0.0
    max_sec: float | None = None
    device_index: int = 0
    cpu_cache_flush: bool = False
    race: Race | None = None


# (artifact_path, device_type, args_info as JSON objects, options) -> Timing
MeasureFunction = Callable[[str, str, Sequence[Any], MeasureOptions], Timing]


def warm_up() -> None:
    """Do nothing; unpickling it in a fresh worker has imported TVM."""


def measure_artifact(
    artifact_path: str, device_type: str, args_info: Sequence[Any], options: MeasureOptions
) -> Timing:
    """Measure a built candidate on this machine.

    Parameters
    ----------
    artifact_path : str
        What a builder exported.
    device_type : str
        E.g. ``"cpu"`` or ``"cuda"``.
    args_info : sequence
        ``ArgInfo.as_json()`` of each argument.
    options : MeasureOptions

    Returns
    -------
    Timing
    """
    if device_type == "cpu":
        give_threads_cores()
    module = load_module(artifact_path)
    dev = device(device_type, options.device_index)
    fill = tvm.get_global_func(RANDOM_FILL)
    return measure_module(module, dev, fill, args_info, options)


def give_threads_cores() -> None:
    """Start TVM's pool of threads in this process, each thread with a core of its own."""
    start_thread_pool()
    take_free_core()


def measure_module(
    module: Any,
    dev: Any,
    fill: Callable[[Any], Any],
    args_info: Sequence[Any],
    options: MeasureOptions,
) -> Timing:
    """Fill the arguments of a loaded module at random and measure its entry function.

    Parameters
    ----------
    module : tvm.runtime.Module
        Local, or on the far side of an RPC session.
    dev : tvm.runtime.Device
        Where the module lives.
    fill : callable
        Fills a tensor there at random.
    args_info : sequence
        ``ArgInfo.as_json()`` of each argument.
    options : MeasureOptions

    Returns
    -------
    Timing
    """
    (args,) = alloc_argument_common(fill, dev, args_info, 1)
    dev.sync()
    return evaluate(
        _timer(module, dev, args, options.cpu_cache_flush),
        options.rule,
        min_repeat_ms=options.min_repeat_ms,
        max_sec=options.max_sec,
        single_runs=options.cpu_cache_flush,
        race=options.race,
    )


def _timer(module: Any, dev: Any, args: Sequence[Any], cpu_cache_flush: bool) -> Timer:
    preprocess = CPU_CACHE_FLUSH if cpu_cache_flush else ""

    def timer(number: int, repeat: int) -> Sequence[float]:
        evaluator = module.time_evaluator(
            module.entry_name, dev, number=number, repeat=repeat, f_preproc=preprocess
        )
        times: Sequence[float] = evaluator(*args).results
        return times

    return timer


class _Session:
    """The device that this worker holds, from queueing for it until it is measured on."""

    held: Any = None


def count_servers(config: RPCConfig, wait_sec: float) -> int:
    """Return how many servers offer the key, waiting a while for the first.

    Parameters
    ----------
    config : RPCConfig
        Names the tracker and the key.
    wait_sec : float
        How long to go on asking while the tracker cannot be reached or knows no server.

    Returns
    -------
    int
        0 when none came.

    Raises
    ------
    OSError
        When the tracker cannot be reached.
    """
    end = time.monotonic() + wait_sec
    while True:
        late = time.monotonic() >= end
        try:
            n_servers = _n_servers(config)
        except OSError:
            if late:
                raise
            n_servers = 0
        if n_servers or late:
            return n_servers
        time.sleep(TRACKER_POLL_SEC)


def acquire_session(config: RPCConfig, session_timeout_sec: int, wait_sec: float) -> None:
    """Queue for a device and keep its session for :func:`measure_remote`.

    Parameters
    ----------
    config : RPCConfig
    session_timeout_sec : int
        After which the server ends the session by itself.
    wait_sec : float
        How long to queue on while the tracker knows no server with the key.

    Raises
    ------
    AdaptiveError
        When there is no server with the key any more.
    """
    _Session.held = None
    answers: queue.Queue[Any] = queue.Queue()
    asker = threading.Thread(
        target=_request, args=(config, session_timeout_sec, answers), daemon=True
    )
    asker.start()
    while True:
        with contextlib.suppress(queue.Empty):
            answer = answers.get(timeout=TRACKER_POLL_SEC)
            break
        if not count_servers(config, wait_sec):
            raise AdaptiveError(f"no server with the key {config.tracker_key!r} is left")
    if isinstance(answer, Exception):
        raise answer
    _Session.held = answer


def measure_remote(
    artifact_path: str, device_type: str, args_info: Sequence[Any], options: MeasureOptions
) -> Timing:
    """Measure a built candidate on the device that :func:`acquire_session` got.

    Parameters and result are those of :func:`measure_artifact`. The session ends with
    the measurement, so that the device is free for others.
    """
    session, _Session.held = _Session.held, None
    name = Path(artifact_path).name
    session.upload(artifact_path, name)
    module = session.load_module(name)
    dev = session.device(device_type, options.device_index)
    fill = session.get_function(RANDOM_FILL)
    return measure_module(module, dev, fill, args_info, options)


def _n_servers(config: RPCConfig) -> int:
    address = (config.tracker_host, config.tracker_port)
    # TVM's own connection goes on trying for a minute where nobody listens.
    socket.create_connection(address, CONNECT_TIMEOUT_SEC).close()
    tracker = tvm.rpc.connect_tracker(*address)
    try:
        servers = tracker.summary()["server_info"]
    finally:
        tracker.close()
    return sum(server["key"].partition(":")[2] == config.tracker_key for server in servers)


def _request(config: RPCConfig, session_timeout_sec: int, answers: queue.Queue[Any]) -> None:
    try:
        tracker = tvm.rpc.connect_tracker(config.tracker_host, config.tracker_port)
        answers.put(
            tracker.request(
                config.tracker_key,
                priority=config.session_priority,
                session_timeout=session_timeout_sec,
            )
        )
    except Exception as error:
        answers.put(error)
