"""A farm on this machine: TVM's own tracker and servers as processes on loopback.

For tests and benchmarks with devices that die and return.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from tvm_adaptive._tvm import RPCConfig
from tvm_adaptive.errors import AdaptiveError, InvalidOptionError
from tvm_adaptive.runner.rpc.lease import address_of, known_devices
from tvm_adaptive.runner.rpc.runner import AdaptiveRPCRunner

HOST = "127.0.0.1"
# A server first imports TVM: some seconds each, all of them at once on a few cores.
_START_SEC = 120.0
# When a session's process fails, for instance because the client was killed, TVM's server
# lives but never listens again. Others register again at the session's end.
_STUCK_SEC = 20.0
_SESSION_SEC = 30
_SUPERVISE_SEC = 0.2


class LoopbackFarm:
    """A tracker and servers, each in a process group of its own; a context manager."""

    def __init__(self, n_servers: int, *, restarts: bool = False) -> None:
        self.port = free_port()
        self.config = RPCConfig(HOST, self.port, "board", 1, _SESSION_SEC)
        self._tracker = _start("rpc_tracker", self.port)
        _await_listener(self.port)
        self.servers: dict[int, subprocess.Popen[bytes]] = {}
        for _ in range(n_servers):
            self.start_server(free_port())
        self._is_closed = threading.Event()
        if restarts:
            threading.Thread(target=self._supervise, daemon=True).start()

    def __enter__(self) -> LoopbackFarm:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def address(self, index: int) -> str:
        """Return a device's address as the tracker knows it."""
        return f"{HOST}:{list(self.servers)[index]}"

    def start_server(self, port: int) -> None:
        """Start a server, which registers some seconds later."""
        tracker = ["--tracker", f"{HOST}:{self.port}", "--key", self.config.tracker_key]
        self.servers[port] = _start("rpc_server", port, *tracker)

    def signal_server(self, index: int, number: signal.Signals) -> None:
        """Send a server and all its children a signal."""
        os.killpg(list(self.servers.values())[index].pid, number)

    def kill_servers(self) -> None:
        """Kill all servers."""
        for process in self.servers.values():
            _kill(process)

    def connect(self, *, n_devices: int = 1, **options: Any) -> AdaptiveRPCRunner:
        """Make a runner once enough servers have registered."""
        end_sec = time.monotonic() + _START_SEC
        stuck_sec = time.monotonic() + _STUCK_SEC
        found = ""
        while time.monotonic() < end_sec:
            if time.monotonic() > stuck_sec:
                stuck_sec = end_sec
                self.restart_missing()
            try:
                runner = AdaptiveRPCRunner(self.config, **options)
            except InvalidOptionError as error:
                found = str(error)
            else:
                if runner.n_devices >= n_devices:
                    return runner
                found = f"there are {runner.n_devices}"
                runner.close()
            time.sleep(_SUPERVISE_SEC)
        ended = [port for port, process in self.servers.items() if process.poll() is not None]
        raise AdaptiveError(
            f"{n_devices} servers have not registered within {_START_SEC:g} s ({found}; ended: "
            f"{ended or 'none'}). Look for other programs that use the processor, or start "
            "fewer servers."
        )

    def restart_ended(self) -> None:
        """Restart the servers that have ended."""
        for port, process in list(self.servers.items()):
            if process.poll() is not None and not self._is_closed.is_set():
                self.start_server(port)

    def restart_missing(self) -> None:
        """Restart the servers that are not registered."""
        present = known_devices(self.config, 0.0)
        for port, process in list(self.servers.items()):
            if address_of(HOST, port) not in present:
                _kill(process)
                self.start_server(port)

    def close(self) -> None:
        """Kill tracker and servers."""
        self._is_closed.set()
        self.kill_servers()
        _kill(self._tracker)

    def _supervise(self) -> None:
        while not self._is_closed.wait(_SUPERVISE_SEC):
            self.restart_ended()


def free_port() -> int:
    """Return an unused port of loopback."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _start(program: str, port: int, *options: str) -> subprocess.Popen[bytes]:
    where = ["--host", HOST, "--port", str(port), "--port-end", str(port + 1)]
    return subprocess.Popen(
        [sys.executable, "-m", f"tvm.exec.{program}", *where, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _await_listener(port: int) -> None:
    end_sec = time.monotonic() + _START_SEC
    while time.monotonic() < end_sec:
        with contextlib.suppress(OSError):
            socket.create_connection((HOST, port), 1.0).close()
            return
        time.sleep(0.1)
    raise AdaptiveError(
        f"TVM's tracker does not listen on port {port} after {_START_SEC:g} s. Start it by "
        f"hand to see why: python -m tvm.exec.rpc_tracker --host {HOST} --port {port}"
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
