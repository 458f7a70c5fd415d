"""Workers that are forked: what they have, what they share, and what their server survives."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import cloudpickle
import pytest

from tests.processes import gone
from tvm_adaptive.errors import MachineError
from tvm_adaptive.workers import main as worker_main
from tvm_adaptive.workers.cores import usable_physical_cores
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.main import HEADER, kill_worker
from tvm_adaptive.workers.pool import WorkerPool
from tvm_adaptive.workers.process import Worker

# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIMEOUT_SEC = 60.0


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


def test_threads_of_kernels_are_chosen_after_forking(make_server):
    server = make_server(["tvm_adaptive.runner.measure"])
    assert run(server, n_threads_of_system).value == 1
    for n in {1, usable_physical_cores()}:  # TVM takes no more than there are
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


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGUSR1])
def test_a_server_that_dies_takes_its_workers_along_and_is_replaced(make_server, sig):
    server = make_server()
    pool = WorkerPool(1, server=server)
    before = pool.map(os.getpid, [()], TIMEOUT_SEC)[0].value
    old = pool.map(parent, [()], TIMEOUT_SEC)[0].value
    os.kill(old, sig)
    assert gone(before)
    while not server._connection.lost:  # until a thread has noticed, a task fails by it
        time.sleep(0.01)
    (found,) = pool.map(parent, [()], TIMEOUT_SEC)
    assert found.error is None
    assert found.value != old
    pool.close()


def test_a_signal_to_all_processes_of_a_job_ends_only_what_workers_have_started(make_server):
    def tell_all():
        for pid in (os.getppid(), os.getpid()):
            os.kill(pid, signal.SIGTERM)
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        forked = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        program = subprocess.run(["sh", "-c", "kill $$"], check=False)
        return os.getpid(), forked, program.returncode

    pool = WorkerPool(1, server=make_server())
    server, before = (pool.map(each, [()], TIMEOUT_SEC)[0].value for each in (parent, os.getpid))
    outcome = pool.map(tell_all, [()], TIMEOUT_SEC)[0]
    assert outcome.value == (before, -signal.SIGTERM, -signal.SIGTERM)
    assert pool.map(parent, [()], TIMEOUT_SEC)[0].value == server
    pool.close()


def test_a_program_that_blocks_the_end_of_children_still_learns_of_it(make_server):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        server = make_server()
        outcome = run(server, lambda: os.kill(os.getpid(), signal.SIGSEGV))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert "killed by SIGSEGV" in str(outcome.error)


def test_what_ran_when_the_server_died_has_done_no_wrong(make_server):
    pool = WorkerPool(2, server=make_server())

    def end_the_server():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    outcomes = pool.map(end_the_server, [()], TIMEOUT_SEC)
    outcomes += pool.map(time.sleep, [(0.01,)] * 3, TIMEOUT_SEC)
    pool.close()
    with pytest.raises(MachineError, match="process that workers are forked from has ended"):
        raise outcomes[0].error
    assert [outcome.error for outcome in outcomes[1:]] == [None] * 3


def parent_of(pid):
    """Return the id of a process's parent, None if it has been reaped."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    # Reaped before the file was opened, or between that and the reading.
    except (FileNotFoundError, ProcessLookupError):
        return None


class Asker:
    """Forks workers that leave with a code of their own, and looks at them."""

    def __init__(self, server):
        self.server = server
        self.forked = []
        self.wrong = []

    def fork(self, codes):
        for code in codes:
            to_worker, from_worker = os.pipe(), os.pipe()
            try:
                process = self.server.fork((to_worker[0], from_worker[1]), None)
                os.close(to_worker[0])
                task = cloudpickle.dumps((os._exit, (code,)))
                os.write(to_worker[1], HEADER.pack(len(task)) + task)
                os.close(to_worker[1])
                self.forked.append((process, code))
                if parent_of(pid_of(process)) == os.getpid():
                    self.wrong.append("not forked by the server")
                if wait(process) != code:
                    self.wrong.append((code, process.poll()))
            except Exception as error:
                self.wrong.append(repr(error))
            finally:
                os.close(from_worker[0])
                os.close(from_worker[1])

    def poll_all(self, done):
        while not done.is_set():
            for process, code in list(self.forked):
                found = process.poll()
                if found not in (None, code):
                    self.wrong.append((code, found))
            time.sleep(0.001)


def test_each_asker_gets_its_own_answer(make_server):
    n_forks = 300
    asker, done = Asker(make_server()), threading.Event()
    codes = [list(range(n_forks))[start::8] for start in range(8)]
    forkers = [
        threading.Thread(target=asker.fork, args=([code % 250 + 1 for code in each],))
        for each in codes
    ]
    pollers = [threading.Thread(target=asker.poll_all, args=(done,)) for _ in range(4)]
    for thread in (*forkers, *pollers):
        thread.start()
    for thread in forkers:
        thread.join()
    done.set()
    for thread in pollers:
        thread.join()
    assert asker.wrong == []
    assert sorted(process.poll() for process, _ in asker.forked) == sorted(
        code % 250 + 1 for code in range(n_forks)
    )


@pytest.fixture
def fake(monkeypatch):
    """Return a function that makes a server with prepared answers."""
    monkeypatch.setattr("tvm_adaptive.workers.fork_server._LEAVE_TIMEOUT_SEC", 0.01)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(
        "tvm_adaptive.workers.fork_server.start_program",
        lambda *_: subprocess.Popen(["sleep", "1000"], start_new_session=True),
    )
    monkeypatch.setattr(
        "tvm_adaptive.workers.fork_server.socket.socketpair", lambda *_: (ours, theirs)
    )
    with theirs.dup() as end:
        yield end


def wait(process):
    end_sec = time.monotonic() + TIMEOUT_SEC
    while (code := process.poll()) is None and time.monotonic() < end_sec:
        time.sleep(0.001)
    return code


def pid_of(process):
    while process.pid is None:
        process.poll()  # raises if there will be none; a short worker may have ended since
        time.sleep(0.001)
    return process.pid


def ask(server):
    reads, writes = os.pipe()
    try:
        return server.fork((reads, writes), None)
    finally:
        os.close(reads)
        os.close(writes)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"no JSON",
        b"7",
        b"[" * 60_000,
        b'["forked", 99, 4711]',  # of somebody else's question
        b'["forked", true, 4711]',
        b'["forked", 1, 1]',
        b'["forked", 1, -1]',
        b'["forked", 1, "x"]',
        b'["ended", 1, 0]',  # it was never forked
    ],
    ids=lambda answer: answer[:24].decode(),
)
def test_an_answer_that_cannot_be_is_nobodys_answer(make_server, fake, answer):
    server = make_server()
    first, second = ask(server), ask(server)
    if answer:
        fake.send(answer)
    else:
        fake.shutdown(socket.SHUT_RDWR)
    for worker in (first, second):
        with pytest.raises(MachineError, match="process that workers are forked from"):
            wait(worker)
        with pytest.raises(MachineError):
            pid_of(worker)


def test_answers_may_come_in_any_order(make_server, fake):
    server = make_server()
    first, second = ask(server), ask(server)
    for message in (
        ["forked", 2, 222],
        ["ended", 2, 22],
        ["refused", 1, errno.EAGAIN],
    ):
        fake.send(json.dumps(message).encode())
    assert (pid_of(second), wait(second)) == (222, 22)
    with pytest.raises(MachineError, match="would not fork another worker: Resource temp"):
        wait(first)


def test_entries_of_the_path_that_python_skips_are_skipped(make_server, monkeypatch):
    monkeypatch.setattr(sys, "path", [Path("/nowhere"), *sys.path])
    worker = ask(make_server())
    assert pid_of(worker) > 1


def test_no_news_is_no_end(make_server):
    server = make_server()
    worker, process = Worker(server), None
    try:
        worker.send(os.getppid, ())
        while (answer := worker.receive()) is None:
            time.sleep(0.01)
        (process,) = answer
        os.kill(process, signal.SIGSTOP)
        for _ in range(3):
            assert not worker.has_ended()
        worker.send(os.getpid, ())
        while (answer := worker.receive()) is None:
            time.sleep(0.01)
        assert answer == (worker._process.pid,)
    finally:
        if process is not None:
            os.kill(process, signal.SIGCONT)
        worker.kill()


def test_looking_does_not_wait_for_a_fork_that_waits_for_an_import(make_server, tmp_path):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(1.5)\n")
    sys.path.insert(0, str(tmp_path))
    try:
        worker = ask(make_server(["slow_to_import"]))
    finally:
        sys.path.remove(str(tmp_path))
    assert worker.poll() is None
    assert worker.started_sec is None  # the answer, that nothing is known, comes at once
    assert pid_of(worker) > 1


@pytest.mark.parametrize("pid", [0, 1, -1, True, 4.0, "77", None])
def test_no_signal_to_what_is_no_worker(pid, monkeypatch):
    sent = []
    monkeypatch.setattr(os, "killpg", lambda *args: sent.append(args))
    with pytest.raises(ValueError, match="is not the id of a worker"):
        kill_worker(pid)
    assert sent == []


def test_a_worker_that_has_ended_is_not_signalled_again(make_server, monkeypatch):
    worker = Worker(make_server())
    worker.send(os._exit, (0,))
    while not worker.has_ended():
        time.sleep(0.01)
    sent = []
    monkeypatch.setattr(os, "kill", lambda *args: sent.append(args))
    monkeypatch.setattr(os, "killpg", lambda *args: sent.append(args))
    worker.kill()
    assert sent == []


def test_a_limit_of_processes_is_the_machines_failure(make_server, tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("needs a user without other processes, whom only root can become")
    (tmp_path / "for_two_processes.py").write_text(
        "import os, resource\n"
        "os.setresuid(54321, 54321, 54321)\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    server = make_server(["for_two_processes"])
    # Nobody may import more than what is loaded already.
    options = {"server": server, "setup": os.getpid, "start_patience_sec": 0.5}
    first, second = (WorkerPool(1, **options) for _ in range(2))
    before = first.map(os.getpid, [()], TIMEOUT_SEC)[0]
    refused = second.map(os.getpid, [()], TIMEOUT_SEC)[0]
    with pytest.raises(MachineError, match="would not fork another worker: Resource temporarily"):
        raise refused.error
    assert first.map(os.getpid, [()], TIMEOUT_SEC)[0].value == before.value
    # When there is room again, there is a worker.
    first.close()
    assert second.map(os.getpid, [()], TIMEOUT_SEC)[0].error is None
    second.close()


def test_a_server_that_is_stopped_is_replaced(make_server, monkeypatch):
    monkeypatch.setattr("tvm_adaptive.workers.fork_server._FORK_TIMEOUT_SEC", 1.0)
    server = make_server()
    old = run(server, parent).value
    os.kill(old, signal.SIGSTOP)
    found = run(server, parent)
    assert found.error is None
    assert found.value != old
    assert gone(old)


@pytest.mark.slow
def test_a_server_that_is_silent_for_long_is_not_replaced(make_server):
    server = make_server()
    pid = run(server, parent).value
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(8.0, os.kill, (pid, signal.SIGCONT)).start()
    found = run(server, parent)
    assert (found.value, found.error) == (pid, None)


def test_closing_ends_server_and_workers(make_server):
    server = make_server()
    pool = WorkerPool(1, server=server)
    (worker,) = pool.map(os.getpid, [()], TIMEOUT_SEC)
    (process,) = pool.map(parent, [()], TIMEOUT_SEC)
    server.close()
    assert gone(worker.value)
    assert gone(process.value)
    (outcome,) = pool.map(os.getpid, [()], TIMEOUT_SEC)
    assert outcome.value not in (None, worker.value)
    pool.close()


def test_a_copy_of_this_process_ends_nothing_of_it(make_server):
    pool = WorkerPool(1, server=make_server())
    (worker,) = pool.map(os.getpid, [()], TIMEOUT_SEC)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):  # two would read the answers of one worker
            (own,) = pool.map(os.getpid, [()], TIMEOUT_SEC)
            pool.close()
            code = int(own.value in (None, worker.value))
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    (again,) = pool.map(os.getpid, [()], TIMEOUT_SEC)
    assert again.value == worker.value
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
    monkeypatch.setattr("tvm_adaptive.workers.fork_server.sys.executable", "/no/such/python")
    outcome = run(make_server(), os.getpid)
    assert isinstance(outcome.error, MachineError)
    assert "could not be started" in str(outcome.error)


@pytest.mark.parametrize(
    ("closed", "starts_first"), [("2>&-", True), ("<&- 2>&-", False)], ids=["socket", "pipe"]
)
def test_what_is_written_to_a_closed_standard_error_reaches_no_worker(closed, starts_first):
    program = f"""
        import os, runpy
        # The whole package takes seconds.
        runpy.run_path({worker_main.__file__!r})["defer_package"]("tvm_adaptive")
        from tvm_adaptive.workers.fork_server import ForkServer
        from tvm_adaptive.workers.pool import WorkerPool
        server = ForkServer()
        if {starts_first}:
            server.start()
        pool = WorkerPool(1, server=server)
        (first,) = pool.map(os.getppid, [()], 20.0)
        os.write(2, b"warning")
        (second,) = pool.map(os.getppid, [()], 20.0)
        print(first.error, second.error, first.value == second.value)
        pool.close()
        server.close()
    """
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout == "None None True\n"
