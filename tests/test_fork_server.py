"""Workers that are forked: what they have, what they share, and what their server survives."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import cloudpickle
import pytest

from tvm_adaptive.cores import usable_physical_cores
from tvm_adaptive.errors import WorkerDiedError
from tvm_adaptive.fork_server import ForkServer, new_fork_server
from tvm_adaptive.workers import WorkerPool

# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIMEOUT_SEC = 60.0
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


@pytest.fixture
def make_server():
    servers = []

    def make(modules=()):
        servers.append(ForkServer(modules))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def run(server, function, *args, **options):
    pool = WorkerPool(1, server=server, **options)
    try:
        (outcome,) = pool.map(function, [args], TIMEOUT_SEC)
    finally:
        pool.close()
    return outcome


def loaded(name):
    return name in sys.modules


def parent():
    return os.getppid()


def n_threads_of_tvm():
    from tvm.runtime import num_threads

    return num_threads()


def n_threads_of_system():
    return len(os.listdir("/proc/self/task"))


def gone(process):
    for _ in range(100):
        status = Path(f"/proc/{process}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return True
        time.sleep(0.1)
    return False


def test_workers_have_the_modules_of_their_server(make_server):
    assert run(make_server(["fractions"]), loaded, "fractions").value
    assert not run(make_server(), loaded, "fractions").value


def test_pools_share_a_server(make_server):
    server = make_server()
    assert run(server, parent).value == run(server, parent).value


def test_a_module_that_cannot_be_imported_costs_nothing(make_server):
    assert run(make_server(["no_such_module", "fractions"]), loaded, "fractions").value


def test_each_pool_has_its_own_environment(make_server):
    server = make_server()
    first = run(server, os.getenv, "GREETING", env={"GREETING": "hello"})
    second = run(server, os.getenv, "GREETING")
    assert (first.value, second.value) == ("hello", None)


# TVM takes no more than there are.
@pytest.mark.parametrize("n", sorted({1, usable_physical_cores()}))
def test_threads_of_kernels_are_chosen_after_forking(make_server, n):
    server = make_server(["tvm_adaptive.runner.measure"])
    assert run(server, n_threads_of_system).value == 1
    assert run(server, n_threads_of_tvm, env={"TVM_NUM_THREADS": str(n)}).value == n


def test_torch_is_left_out_and_can_still_be_imported(make_server, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "wants_torch.py").write_text(
        "try:\n    import torch\nexcept ImportError:\n    torch = None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def found():
        import torch
        import wants_torch

        return wants_torch.torch, torch.__name__

    assert run(make_server(["wants_torch"]), found).value == (None, "torch")


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_dies_takes_its_workers_along_and_is_replaced(make_server, sig):
    server = make_server()
    pool = WorkerPool(1, server=server)
    before = pool.map(os.getpid, [()], TIMEOUT_SEC)[0].value
    old = pool.map(parent, [()], TIMEOUT_SEC)[0].value
    os.kill(old, sig)
    assert gone(before)
    (lost,) = pool.map(parent, [()], TIMEOUT_SEC)
    assert isinstance(lost.error, WorkerDiedError)
    (found,) = pool.map(parent, [()], TIMEOUT_SEC)
    assert found.error is None
    assert found.value != old
    pool.close()


def test_a_server_that_is_stopped_is_replaced(make_server, monkeypatch):
    monkeypatch.setattr("tvm_adaptive.fork_server._IMPORT_TIMEOUT_SEC", 1.0)
    server = make_server()
    old = run(server, parent).value
    os.kill(old, signal.SIGSTOP)
    found = run(server, parent)
    assert found.error is None
    assert found.value != old
    assert gone(old)


def test_closing_ends_server_and_workers(make_server):
    server = make_server()
    pool = WorkerPool(1, server=server)
    (worker,) = pool.map(os.getpid, [()], TIMEOUT_SEC)
    (process,) = pool.map(parent, [()], TIMEOUT_SEC)
    server.close()
    assert gone(worker.value)
    assert gone(process.value)
    (outcome,) = pool.map(os.getpid, [()], TIMEOUT_SEC)
    assert isinstance(outcome.error, WorkerDiedError)
    pool.close()


def test_a_killed_worker_is_replaced_by_one_that_has_the_modules(make_server):
    pool = WorkerPool(1, server=make_server(["tvm_adaptive.builder.compile"]))
    for _ in range(3):
        (outcome,) = pool.map(os._exit, [(3,)], TIMEOUT_SEC)
        assert "exit code 3" in str(outcome.error)
        (outcome,) = pool.map(loaded, [("tvm",)], TIMEOUT_SEC)
        assert outcome.value
    pool.close()


def test_nothing_is_left_of_workers_that_ended(make_server):
    pool = WorkerPool(2, server=make_server())
    pool.map(os._exit, [(0,)] * 6, TIMEOUT_SEC)
    (outcome,) = pool.map(parent, [()], TIMEOUT_SEC)
    pool.close()
    server = outcome.value
    assert Path(f"/proc/{server}/task/{server}/children").read_text().split() == []


def test_a_server_that_cannot_start_is_an_error_of_each_task(make_server, monkeypatch):
    monkeypatch.setattr("tvm_adaptive.fork_server.sys.executable", "/no/such/python")
    outcome = run(make_server(), os.getpid)
    assert isinstance(outcome.error, WorkerDiedError)
    assert "could not be started" in str(outcome.error)


def test_none_where_forking_is_not_safe(monkeypatch):
    monkeypatch.setattr("tvm_adaptive.fork_server._IS_AVAILABLE", False)
    assert new_fork_server(["fractions"]) is None
