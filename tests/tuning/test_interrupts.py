from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.interrupts import interruptible, keeping_handlers
from tvm_adaptive.workers import main as worker_main

PROGRAM = Path(worker_main.__file__)
# The main thread is in C, where Python's handlers do not run, or waits for a database.
BLOCKED = f"""
import runpy
runpy.run_path({str(PROGRAM)!r})["defer_package"]("tvm_adaptive")  # TVM is not needed
import ctypes, logging, os, pathlib, sqlite3, sys
from tvm_adaptive.tuning.interrupts import interruptible
from tvm_adaptive.tuning.run_lock import owned
work_dir, where = pathlib.Path(sys.argv[1]), sys.argv[2]
interrupt = lambda: os.write(1, b"interrupted\\n")  # in one piece: two threads may call it
def hang():
    mutex = ctypes.create_string_buffer(256)  # zeros are an open one
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
if where == "logging":  # standard error is a full pipe
    handler = logging.StreamHandler()
    handler.emit = lambda record: hang()
    logging.getLogger().addHandler(handler)
with owned(work_dir) as owner:
    with interruptible(interrupt, restore_screen=hang, release=owner.release):
        print("ready", flush=True)
        if where != "database":
            hang()
        else:
            sqlite3.connect(work_dir / "store.db", timeout=60).execute("BEGIN IMMEDIATE")
"""
# A child's signal, at the earliest moment, or its exit, and afterwards one to the program itself.
FORKING = f"""
import os, signal, sys, threading
early = lambda: signal.raise_signal(signal.SIGTERM)
if sys.argv[1] == "early":
    os.register_at_fork(after_in_child=early)  # runs before what is registered later
import runpy
runpy.run_path({str(PROGRAM)!r})["defer_package"]("tvm_adaptive")  # TVM is not needed
from tvm_adaptive.tuning.interrupts import interruptible
is_seen = threading.Event()
def interrupt():
    name = threading.current_thread().name
    os.write(1, f"interrupted in {{name}}\\n".encode())
    if name == "signals":
        is_seen.set()
def fork():
    child = os.fork()
    if child == 0:
        if sys.argv[1] == "exit":
            sys.exit(3)
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os.write(1, f"the child ended with {{os.waitstatus_to_exitcode(status)}}\\n".encode())
with interruptible(interrupt, restore_screen=None, release=None):
    if sys.argv[1] == "thread":
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    else:
        fork()
    os.write(1, b"now the program\\n")
    signal.raise_signal(signal.SIGTERM)
    is_seen.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_sets_a_flag_and_handlers_come_back(number: signal.Signals) -> None:
    def ours(*_: object) -> None:
        pytest.fail("a handler of before has run")

    budget, before = Budget(None), signal.signal(number, ours)  # under "nohup" one is ignored
    try:
        with interruptible(budget.interrupt, restore_screen=pytest.fail, release=pytest.fail):
            signal.raise_signal(number)
            signal.raise_signal(number)  # an echo
            assert budget.should_stop()
        assert signal.getsignal(number) is ours
    finally:
        signal.signal(number, before)
    assert signal.set_wakeup_fd(-1) == -1
    assert not any(thread.name == "signals" for thread in threading.enumerate())


@pytest.mark.timeout(30)
def test_the_end_waits_for_no_child_that_holds_the_pipe() -> None:
    with interruptible(Budget(None).interrupt, restore_screen=pytest.fail, release=pytest.fail):
        pipe = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
        held = os.dup(pipe)  # as in a process that was forked meanwhile
    os.close(held)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("signal", -signal.SIGTERM),
        ("thread", -signal.SIGTERM),
        ("early", -signal.SIGTERM),
        ("exit", 3),
    ],
)
def test_a_forked_child_ends_alone(case: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING, case], stdout=subprocess.PIPE, text=True, check=True
    )
    before, after = done.stdout.split("now the program\n")
    assert before == f"the child ended with {int(code)}\n"
    # The handler in Python, and the thread that sees a signal whatever the main thread does.
    assert sorted(after.splitlines()) == [
        "interrupted in MainThread",
        "interrupted in signals",
    ]


def test_a_child_of_multiprocessing_ends_alone() -> None:
    budget, context = Budget(None), multiprocessing.get_context("fork")
    # The command line, in a test before this one, has Python raise KeyboardInterrupt.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with interruptible(budget.interrupt, restore_screen=pytest.fail, release=pytest.fail):
            child = context.Process(target=signal.raise_signal, args=(signal.SIGTERM,))
            child.start()
            child.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert child.exitcode == -signal.SIGTERM
    assert not budget.interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_so(number: signal.Signals) -> None:
    """By "nohup", or in the background of a script."""
    budget, before = Budget(None), signal.signal(number, signal.SIG_IGN)
    try:
        with interruptible(budget.interrupt, restore_screen=pytest.fail, release=pytest.fail):
            signal.raise_signal(number)
        assert not budget.interrupted
        with keeping_handlers():
            signal.signal(number, signal.SIG_DFL)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("is_interactive", "text"),
    [(False, "a second one ends it within two seconds"), (True, "restart Python to end it now")],
)
def test_the_first_signal_says_what_ends_the_run_sooner(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    is_interactive: bool,
    text: str,
) -> None:
    if is_interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    else:
        monkeypatch.delattr(sys, "ps1", raising=False)
    with interruptible(Budget(None).interrupt, restore_screen=pytest.fail, release=pytest.fail):
        signal.raise_signal(signal.SIGINT)
        end_sec = time.monotonic() + 10.0
        while not caplog.messages and time.monotonic() < end_sec:  # another thread logs it
            time.sleep(0.01)
    assert caplog.messages == [f"SIGINT: the run ends after this batch; {text}"]


def test_other_threads_catch_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def run() -> None:
        with interruptible(pytest.fail, restore_screen=pytest.fail, release=pytest.fail):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize("where", ["C", "database", "logging"])
def test_a_second_signal_ends_a_run_that_is_blocked(tmp_path: Path, where: str) -> None:
    import sqlite3

    connection = sqlite3.connect(tmp_path / "store.db")
    connection.execute("BEGIN IMMEDIATE")
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(tmp_path), where],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGTERM)
    # The flag is set though the main thread does not run.
    assert process.stdout.readline() == "interrupted\n"
    time.sleep(1.0)  # no echo any more
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    connection.close()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["store.db"]
