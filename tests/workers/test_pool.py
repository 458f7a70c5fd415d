"""Worker processes: deadlines, deaths, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import cloudpickle
import pytest

from tests.processes import gone
from tvm_adaptive.errors import (
    MachineError,
    WorkerDiedError,
    WorkerError,
    WorkerTaskError,
    WorkerTimeoutError,
)
from tvm_adaptive.workers import main as worker_main
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.pool import Step, WorkerPool
from tvm_adaptive.workers.process import Worker

# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIMEOUT_SEC = 30.0


def double(x):
    return 2 * x


def fail(text):
    raise ValueError(text)


def die(sig):
    os.kill(os.getpid(), sig)
    time.sleep(100)


def leave(code):
    os._exit(code)


def hold_the_lock():
    ctypes.PyDLL(None).sleep(1000)


def pid(*_):
    return os.getpid()


def start_grandchild():
    return subprocess.Popen(["sleep", "1000"]).pid


def fork_and_leave(note):
    """Leave behind a process that holds the pipe of the answers open."""
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    Path(note).write_text(str(child))
    os._exit(3)


class Unpicklable:
    def __reduce__(self):
        raise TypeError("cannot travel")


class Unreadable:
    def __reduce__(self):
        return (fail, ("not readable",))


@pytest.fixture(scope="module")
def server():
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def make_pool(server):
    pools = []

    def make(max_workers=1, **options):
        server.start()
        pools.append(WorkerPool(max_workers, server=server, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_values_come_in_the_order_of_the_tasks(make_pool):
    outcomes = make_pool(2).map(double, [(i,) for i in range(9)], TIMEOUT_SEC)
    assert [outcome.value for outcome in outcomes] == [2 * i for i in range(9)]


def test_a_worker_stays_for_the_next_call(make_pool):
    pool = make_pool()
    first, second = (pool.map(pid, [()], TIMEOUT_SEC)[0].value for _ in range(2))
    assert first == second


def test_large_tasks_and_answers_travel(make_pool):
    data = os.urandom(5_000_000)
    (outcome,) = make_pool().map(bytes.upper, [(data,)], TIMEOUT_SEC)
    assert outcome.value == data.upper()


@pytest.mark.parametrize(
    ("function", "args", "error", "message"),
    [
        (fail, ("broken",), WorkerTaskError, "ValueError: broken"),
        (die, (signal.SIGSEGV,), WorkerDiedError, "killed by SIGSEGV"),
        (die, (signal.SIGKILL,), WorkerDiedError, "killed by SIGKILL"),
        (leave, (3,), WorkerDiedError, "exit code 3"),
        (hold_the_lock, (), WorkerTimeoutError, "killed after 0.5 s of running"),
        (die, (signal.SIGSTOP,), WorkerTimeoutError, "killed after 0.5 s of running"),
        (Unpicklable, (), WorkerTaskError, "cannot travel"),
        (Unreadable, (), WorkerDiedError, "could not be read.*not readable"),
        (double, (Unpicklable(),), WorkerTaskError, "could not be sent.*cannot travel"),
    ],
)
def test_a_failure_is_one_outcome(make_pool, function, args, error, message):
    pool = make_pool()
    pool.map(pid, [()], TIMEOUT_SEC)  # it has started
    (failed,) = pool.map(function, [args], 0.5)
    with pytest.raises(error, match=message):
        raise failed.error
    (good,) = pool.map(double, [(4,)], TIMEOUT_SEC)
    assert good.value == 8


def test_one_that_hangs_does_not_hold_up_the_others(make_pool):
    tasks = [(signal.SIGSTOP,), (signal.SIGKILL,), (signal.SIGKILL,)]
    outcomes = make_pool(2).map(die, tasks, 1.0)
    kinds = [type(outcome.error) for outcome in outcomes]
    assert kinds == [WorkerTimeoutError, WorkerDiedError, WorkerDiedError]


@pytest.mark.parametrize("size", [10, 10_000_000])
def test_a_stopped_worker_cannot_block_the_sender(make_pool, size):
    pool = make_pool()
    (stopped,) = pool.map(pid, [()], TIMEOUT_SEC)
    os.kill(stopped.value, signal.SIGSTOP)
    (outcome,) = pool.map(len, [(bytes(size),)], 0.5)
    assert isinstance(outcome.error, WorkerTimeoutError)
    assert gone(stopped.value)


def test_a_worker_killed_while_idle_costs_nothing(make_pool):
    pool = make_pool()
    (victim,) = pool.map(pid, [()], TIMEOUT_SEC)
    os.kill(victim.value, signal.SIGKILL)
    assert gone(victim.value)
    for worker in pool._idle:  # another process reports the ends of forked workers
        assert eventually(worker.has_ended)
    (outcome,) = pool.map(double, [(1,)], TIMEOUT_SEC)
    assert outcome.value == 2


def eventually(holds):
    for _ in range(100):
        if holds():
            return True
        time.sleep(0.1)
    return False


def test_a_death_shows_although_a_forked_process_holds_the_pipe(make_pool, tmp_path):
    note = tmp_path / "pid"
    (outcome,) = make_pool().map(fork_and_leave, [(str(note),)], TIMEOUT_SEC)
    with pytest.raises(WorkerDiedError, match="exit code 3"):
        raise outcome.error
    assert gone(int(note.read_text()))


def test_closing_kills_grandchildren(make_pool):
    pool = make_pool()
    (outcome,) = pool.map(start_grandchild, [()], TIMEOUT_SEC)
    pool.close()
    assert gone(outcome.value)


@pytest.mark.parametrize(("replace", "same"), [(False, True), (True, False)])
def test_replace_after_error(make_pool, replace, same):
    pool = make_pool(replace_after_error=replace)
    (before,) = pool.map(pid, [()], TIMEOUT_SEC)
    pool.map(fail, [("x",)], TIMEOUT_SEC)
    (after,) = pool.map(pid, [()], TIMEOUT_SEC)
    assert (before.value == after.value) == same


def test_max_uses_counts_tasks_only(make_pool):
    pool = make_pool(max_uses=2, setup=os.getpid)
    outcomes = [outcome for _, outcome in pool.stream(both(pid, pid) for _ in range(4))]
    pids = [outcome.value[1] for outcome in outcomes]
    assert pids[0] == pids[1] != pids[2] == pids[3]


def both(first, second):
    """Plan two steps of one worker."""
    values = []
    for function in (first, second):
        values.append((yield Step("running", function, (), TIMEOUT_SEC)))
    return values


def remember():
    os.environ["PREPARED"] = str(int(os.environ.get("PREPARED", "0")) + 1)


def find_prior_trials():
    return os.environ["PREPARED"]


def test_the_steps_of_a_plan_run_in_one_worker(make_pool):
    outcomes = dict(make_pool(2).stream(both(remember, find_prior_trials) for _ in range(2)))
    assert [outcomes[index].value[1] for index in range(2)] == ["1", "1"]


def nap():
    time.sleep(0.8)


def test_setup_does_not_count_against_the_deadline(make_pool):
    (outcome,) = make_pool(setup=nap).map(double, [(2,)], 0.5)
    assert outcome.value == 4


def test_a_setup_that_never_ends_is_not_the_tasks_failure(make_pool, monkeypatch):
    monkeypatch.setattr("tvm_adaptive.workers.pool.START_TIMEOUT_SEC", 0.5)
    (outcome,) = make_pool(setup=hold_the_lock, start_patience_sec=0.0).map(
        double, [(2,)], TIMEOUT_SEC
    )
    with pytest.raises(MachineError, match=r"not be started: timeout: killed after 0\.5 s of s"):
        raise outcome.error


def test_each_step_has_a_deadline_of_its_own(make_pool):
    def plan():
        yield Step("queueing", nap, (), TIMEOUT_SEC)
        return (yield Step("measuring", hold_the_lock, (), 0.5))

    ((_, outcome),) = make_pool().stream([plan()])
    with pytest.raises(WorkerTimeoutError, match=r"killed after 0\.5 s of measuring"):
        raise outcome.error


def test_a_plan_may_go_on_after_an_error_if_its_worker_lives(make_pool):
    def plan(function, *args):
        try:
            yield Step("running", function, args, TIMEOUT_SEC)
        except WorkerError:
            return (yield Step("cleaning up", double, (3,), TIMEOUT_SEC))

    pool = make_pool()
    raised, died = (outcome for _, outcome in pool.stream([plan(fail, "x"), plan(leave, 4)]))
    assert raised.value == 6
    with pytest.raises(WorkerDiedError, match="exit code 4"):
        raise died.error


def test_a_plan_that_catches_its_error_has_none(make_pool):
    def plan():
        try:
            yield Step("running", leave, (4,), TIMEOUT_SEC)
        except WorkerDiedError:
            return "known"

    ((_, outcome),) = make_pool().stream([plan()])
    assert (outcome.value, outcome.error) == ("known", None)


@pytest.mark.parametrize("n_good", [0, 1])
def test_a_plan_with_a_mistake_costs_itself_alone(make_pool, n_good):
    def mistaken():
        for _ in range(n_good):
            yield Step("running", double, (1,), TIMEOUT_SEC)
        raise KeyError("oops")

    outcomes = dict(make_pool().stream([mistaken(), both(pid, pid)]))
    with pytest.raises(WorkerTaskError, match=r"the plan failed: KeyError\('oops'\)"):
        raise outcomes[0].error
    assert outcomes[1].error is None


def test_a_plan_without_steps_needs_no_worker(make_pool):
    def plan():
        return 7
        yield

    assert [outcome.value for _, outcome in make_pool().stream([plan()])] == [7]


def test_plans_may_come_later(make_pool):
    reads, writes = os.pipe()

    def plans():
        yield both(pid, pid)
        yield None
        threading.Timer(0.2, os.write, (writes, b"w")).start()
        yield None
        os.read(reads, 1)
        yield both(pid, pid)

    outcomes = list(make_pool().stream(plans(), wake=reads))
    os.close(reads)
    os.close(writes)
    assert [index for index, _ in outcomes] == [0, 1]


def test_closing_a_stream_kills_the_busy_workers(make_pool):
    pool, note = make_pool(2), []

    def endless():
        try:
            note.append((yield Step("running", pid, (), TIMEOUT_SEC)))
            yield Step("running", hold_the_lock, (), 1000.0)
        finally:
            note.append("closed")

    def until_then():
        while not note:
            yield Step("waiting", time.sleep, (0.05,), TIMEOUT_SEC)

    with contextlib.closing(pool.stream([endless(), until_then()])) as ended:
        assert next(ended)[0] == 1
    assert note[1] == "closed"
    assert gone(note[0])


def test_a_pool_that_shrinks_has_fewer_workers(make_pool):
    pool = make_pool(2)
    pool.map(time.sleep, [(0.5,), (0.5,)], TIMEOUT_SEC)
    pool.max_workers = 1
    pids = {outcome.value for outcome in pool.map(pid, [()] * 6, TIMEOUT_SEC)}
    assert len(pids) <= 2
    assert len({outcome.value for outcome in pool.map(pid, [()] * 6, TIMEOUT_SEC)}) == 1


def name_it(name):
    os.environ["NAME_OF_IT"] = name


def test_each_worker_has_its_own_setup(make_pool):
    setups = [functools.partial(name_it, name) for name in "ab"]
    pool = make_pool(2, setups=setups)

    def slowly():
        time.sleep(0.3)
        return os.environ["NAME_OF_IT"]

    first = {outcome.value for outcome in pool.map(slowly, [()] * 2, TIMEOUT_SEC)}
    pool.map(leave, [(1,)], TIMEOUT_SEC)  # whoever takes its place has its name
    again = {outcome.value for outcome in pool.map(slowly, [()] * 2, TIMEOUT_SEC)}
    assert first == again == {"a", "b"}
    with pytest.raises(ValueError, match="Got 2 setups for 3 workers"):
        WorkerPool(3, setups=setups)


def setup_that_fails():
    raise ImportError("no such library")


def test_a_setup_that_fails_is_the_error_of_each_task(make_pool):
    outcomes = make_pool(setup=setup_that_fails).map(double, [(1,), (2,)], TIMEOUT_SEC)
    for outcome in outcomes:
        with pytest.raises(WorkerTaskError, match="no such library"):
            raise outcome.error


def test_env_reaches_the_worker(make_pool):
    pool = make_pool(env={"GREETING": "hello"})
    (outcome,) = pool.map(os.getenv, [("GREETING",)], TIMEOUT_SEC)
    assert outcome.value == "hello"


def test_those_that_have_a_worker_go_on_while_another_cannot_start(make_pool):
    pool = make_pool(2, start_patience_sec=0.0)
    pool.map(pid, [()], TIMEOUT_SEC)
    # The first worker takes what the second, which cannot be started, does not.
    with no_more_files():
        outcomes = pool.map(double, [(number,) for number in range(5)], TIMEOUT_SEC)
    assert [outcome.value for outcome in outcomes] == [0, 2, 4, 6, 8]


def raise_chained(outer, inner):
    try:
        raise inner
    except BaseException as error:
        raise outer from error


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (raise_chained, (OSError(errno.ENOSPC, "full"), None), "OSError: .*full"),
        (raise_chained, (OSError(errno.EMFILE, "files"), None), "OSError: .*files"),
        (raise_chained, (OSError(errno.ESTALE, "stale"), None), "OSError: .*stale"),
        (raise_chained, (OSError(errno.EROFS, "read-only"), None), "OSError: .*read-only"),
        (raise_chained, (RuntimeError("x"), BlockingIOError(errno.EAGAIN, "fork")), "fork"),
        (raise_chained, (MemoryError("much"), None), "MemoryError: much"),
        (fail, ("ld failed:\n/tmp/x.so: No space left on device\n",), "ValueError: /tmp/x.so: No"),
    ],
)
def test_what_the_machine_could_not_do_is_not_the_tasks_failure(make_pool, function, args, message):
    pool = make_pool()
    failed, good = pool.map(function, [args], TIMEOUT_SEC) + pool.map(double, [(4,)], TIMEOUT_SEC)
    with pytest.raises(MachineError, match=message):
        raise failed.error
    assert "\n" not in str(failed.error)
    assert good.value == 8


def test_a_real_disk_that_is_full(make_pool, make_disk):
    disk = make_disk(64 << 10)
    (outcome,) = make_pool().map(Path.write_bytes, [(disk / "file", bytes(1 << 20))], TIMEOUT_SEC)
    with pytest.raises(MachineError, match="No space left on device"):
        raise outcome.error


@pytest.mark.parametrize(("n_kills", "error"), [(1, MachineError), (0, WorkerDiedError)])
def test_a_worker_that_is_killed_while_memory_runs_out(make_pool, tmp_path, n_kills, error):
    counts = tmp_path / "vmstat"
    counts.write_text("oom_kill 3\n")
    pool = make_pool()
    pool.map(pid, [()], TIMEOUT_SEC)
    (worker,) = pool._idle
    worker._oom_kills._files = [counts]

    def be_killed():
        counts.write_text(f"oom_kill {3 + n_kills}\n")
        die(signal.SIGKILL)

    (outcome,) = pool.map(be_killed, [()], TIMEOUT_SEC)
    with pytest.raises(error, match="out of memory" if n_kills else "killed by SIGKILL"):
        raise outcome.error


def oom_score():
    return int(Path("/proc/self/oom_score_adj").read_text())


def test_workers_go_before_the_tuner_when_memory_runs_out(make_pool):
    (outcome,) = make_pool().map(oom_score, [()], TIMEOUT_SEC)
    assert outcome.value == 1000 >= oom_score()


@contextlib.contextmanager
def no_more_files():
    """Let this process open nothing beyond its standard streams."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_worker_that_cannot_start_is_the_machines_failure(make_pool):
    pool = make_pool(start_patience_sec=0.3)
    before = open_files()
    with no_more_files():
        outcomes = pool.map(double, [(1,), (2,)], TIMEOUT_SEC)
    for outcome in outcomes:
        with pytest.raises(MachineError, match=r"could not be started.*Too many open files"):
            raise outcome.error
    assert open_files() == before
    (outcome,) = pool.map(double, [(1,)], TIMEOUT_SEC)
    assert outcome.value == 2


def test_a_worker_that_cannot_start_now_starts_later(make_pool):
    pool = make_pool(2)

    def plans():
        with no_more_files():
            yield both(pid, pid)
            yield None
            yield None

    outcomes = [outcome for _, outcome in pool.stream(plans())]
    assert [outcome.error for outcome in outcomes] == [None]


def test_no_descriptor_is_left_open(make_pool):
    pool = make_pool()
    before = open_files()
    for _ in range(3):
        pool.map(leave, [(1,)], TIMEOUT_SEC)
    pool.map(double, [(1,)], TIMEOUT_SEC)
    pool.close()
    assert open_files() == before


def test_killing_twice_is_harmless(server):
    worker = Worker(server)
    while (pid := worker._process.pid) is None:
        time.sleep(0.01)
    worker.kill()
    worker.kill()
    assert gone(pid)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_no_orphan_after_the_parent_dies(sig):
    program = f"""
        import os, runpy, time
        # The whole package takes seconds.
        runpy.run_path({worker_main.__file__!r})["defer_package"]("tvm_adaptive")
        from tvm_adaptive.workers.pool import WorkerPool
        pool = WorkerPool(1)
        print(pool.map(os.getpid, [()], 60.0)[0].value, flush=True)
        pool.map(time.sleep, [(1000,)], 2000.0)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    try:
        worker = int(parent.stdout.readline())
        assert not Path(f"/proc/{worker}/status").read_text().startswith("Z")
        parent.send_signal(sig)
        parent.wait()
        assert gone(worker)
    finally:
        with contextlib.suppress(ProcessLookupError):
            parent.kill()
        parent.stdout.close()


def note_and_sleep(folder):
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(1000)


def test_an_interrupt_kills_the_busy_workers(make_pool, tmp_path):
    pool, is_over = make_pool(2), threading.Event()

    def interrupt_the_busy():
        eventually(lambda: is_over.is_set() or len(os.listdir(tmp_path)) == 2)
        if not is_over.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)

    # Not the alarm, which may be the time limit of this test.
    handler = signal.signal(signal.SIGUSR1, _interrupt)
    before = open_files()
    thread = threading.Thread(target=interrupt_the_busy)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt, match="now"):
            pool.map(note_and_sleep, [(str(tmp_path),)] * 2, 2000.0)
    finally:
        is_over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, handler)
    assert open_files() == before
    workers = [int(name) for name in os.listdir(tmp_path)]
    assert len(workers) == 2
    assert all(gone(worker) for worker in workers)


def _interrupt(*_):
    raise KeyboardInterrupt("now")


def test_a_pool_needs_a_worker():
    with pytest.raises(ValueError, match="max_workers must be at least 1 but got 0"):
        WorkerPool(0)


def modules():
    return sorted(sys.modules)


def test_a_worker_starts_without_the_whole_package(make_pool):
    pool = make_pool()
    (outcome,) = pool.map(modules, [()], TIMEOUT_SEC)
    assert "tvm" not in outcome.value
    assert "tvm_adaptive.tuning.registry" not in outcome.value


def ask_the_package():
    import tvm_adaptive

    return tvm_adaptive.__version__


def test_a_worker_has_the_whole_package_once_it_asks():
    with contextlib.closing(WorkerPool(1)) as pool:
        (outcome,) = pool.map(ask_the_package, [()], TIMEOUT_SEC)
    assert outcome.value


def test_a_worker_finds_modules_where_the_parent_does(make_pool, server, tmp_path, monkeypatch):
    (tmp_path / "beside_the_script.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    server.close()  # it has the former path
    import beside_the_script

    (outcome,) = make_pool().map(beside_the_script.answer, [()], TIMEOUT_SEC)
    assert outcome.value == 42
