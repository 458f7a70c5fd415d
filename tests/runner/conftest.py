"""A kernel to measure, and a farm of TVM's own servers to measure it on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import tvm
from tvm import te
from tvm.s_tir.meta_schedule.arg_info import TensorInfo
from tvm.s_tir.meta_schedule.runner import RPCConfig, RunnerInput
from tvm.support.tar import tar

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.runner.rpc import AdaptiveRPCRunner

N = 64
KEY = "board"
_START_SEC = 60.0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Farm:
    """A tracker and servers, each in a process group of its own.

    A kernel that crashes ends TVM's server; with ``restarts`` another takes its place, as
    a supervisor would do it on a real device.
    """

    def __init__(self, n_servers, restarts=False):
        self.port = free_port()
        self.config = RPCConfig("127.0.0.1", self.port, KEY, 1, 30)
        self.tracker = self._start("rpc_tracker", self.port)
        self._await(self.port)
        self.servers = {free_port(): None for _ in range(n_servers)}
        for port in self.servers:
            self.start_server(port)
        self._is_closed = False
        if restarts:
            threading.Thread(target=self._supervise, daemon=True).start()

    def address(self, index):
        return f"127.0.0.1:{list(self.servers)[index]}"

    def start_server(self, port):
        tracker = ["--tracker", f"127.0.0.1:{self.port}", "--key", KEY]
        self.servers[port] = self._start("rpc_server", port, *tracker)

    def _start(self, program, port, *options):
        where = ["--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1)]
        return subprocess.Popen(
            [sys.executable, "-m", f"tvm.exec.{program}", *where, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _await(self, port):
        end_sec = time.monotonic() + _START_SEC
        while time.monotonic() < end_sec:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            time.sleep(0.1)

    def _supervise(self):
        while not self._is_closed:
            for port, process in list(self.servers.items()):
                if process.poll() is not None and not self._is_closed:
                    self.start_server(port)
            time.sleep(0.2)

    def signal_server(self, index, number):
        os.killpg(list(self.servers.values())[index].pid, number)

    def kill_servers(self):
        for process in self.servers.values():
            self._kill(process)

    def close(self):
        self._is_closed = True
        self.kill_servers()
        self._kill(self.tracker)

    def _kill(self, process):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def connect(self, *, n_devices=1, **options):
        """Make a runner once enough servers have registered."""
        end_sec = time.monotonic() + _START_SEC
        while True:
            with contextlib.suppress(InvalidOptionError):
                runner = AdaptiveRPCRunner(self.config, **options)
                if runner.n_devices >= n_devices:
                    return runner
                runner.close()
            if time.monotonic() > end_sec:
                raise TimeoutError(f"{n_devices} servers have not come")
            time.sleep(0.2)


@pytest.fixture(scope="session")
def matmul(tmp_path_factory):
    a, b = (te.placeholder((N, N), name=name) for name in "AB")
    k = te.reduce_axis((0, N))
    c = te.compute((N, N), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k))
    mod = tvm.IRModule({"main": te.create_prim_func([a, b, c])})
    target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
    path = tmp_path_factory.mktemp("artifact") / "matmul.tar"
    tvm.driver.build(mod, target=target).export_library(str(path), fcompile=tar)
    return RunnerInput(str(path), "cpu", [TensorInfo("float32", (N, N))] * 3)


@pytest.fixture
def make_farm():
    farms = []

    def make(n_servers, **options):
        farms.append(Farm(n_servers, **options))
        return farms[-1]

    yield make
    for farm in farms:
        farm.close()


@pytest.fixture(scope="module")
def farm():
    farm = Farm(n_servers=2)
    yield farm
    farm.close()


@pytest.fixture
def unused_port():
    return free_port()
