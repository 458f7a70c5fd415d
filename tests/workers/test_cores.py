import os
import subprocess
import sys

import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.workers import cores
from tvm_adaptive.workers.cores import thread_env, usable_physical_cores

needs_two = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="binding threads needs two processors"
)


def in_a_process(body: str) -> str:
    """Run a program that may bind itself, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", body],
        env={**os.environ, "TVM_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@needs_two
def test_the_caller_leaves_the_cores_of_the_pool_alone():
    body = """
import os
from tvm_adaptive._tvm import start_thread_pool
from tvm_adaptive.workers.cores import take_free_core
before = os.sched_getaffinity(0)
assert start_thread_pool() == 2
take_free_core()
mine = os.sched_getaffinity(0)
others = [os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")]
bound = set().union(*(each for each in others if len(each) == 1 and each != mine))
print(bool(mine) and mine < before and not mine & bound)
"""
    assert in_a_process(body) == "True"


@needs_two
def test_a_shared_pool_has_no_more_threads_than_it_uses():
    body = """
import os
from tvm_adaptive._tvm import start_thread_pool
from tvm_adaptive._tvm.threads import share_threads
n_before, usable = len(os.listdir("/proc/self/task")), os.sched_getaffinity(0)
share_threads(1)
n_started = len(os.listdir("/proc/self/task")) - n_before
print(n_started, start_thread_pool(), os.sched_getaffinity(0) == usable)
"""
    assert in_a_process(body) == "0 1 True"


@pytest.mark.slow
@needs_two
def test_nothing_is_bound_where_no_other_thread_is():
    body = """
import os
from tvm_adaptive.workers.cores import take_free_core
before = os.sched_getaffinity(0)
take_free_core()
print(os.sched_getaffinity(0) == before)
"""
    assert in_a_process(body) == "True"


@pytest.mark.slow
@needs_two
def test_no_core_left_is_no_error():
    body = """
import os, threading
from tvm_adaptive.workers.cores import take_free_core
ready, done = threading.Barrier(len(os.sched_getaffinity(0)) + 1), threading.Event()
def occupy(cpu):
    os.sched_setaffinity(0, {cpu})
    ready.wait()
    done.wait()
before = os.sched_getaffinity(0)
for cpu in before:
    threading.Thread(target=occupy, args=(cpu,), daemon=True).start()
ready.wait()
take_free_core()
print(os.sched_getaffinity(0) == before)
done.set()
"""
    assert in_a_process(body) == "True"


@pytest.mark.parametrize(
    ("usable", "is_bound"), [([0, 1], True), ([0, 1, 2], False), ([4, 5], False)]
)
def test_tvm_binds_threads_only_where_they_are_the_whole_machine(monkeypatch, usable, is_bound):
    monkeypatch.setattr(cores, "_allowed_cores", lambda: usable)
    assert ("TVM_BIND_THREADS" not in thread_env(2)) == is_bound


@pytest.mark.parametrize(("fast", "is_bound"), [([], True), ([0, 1], True), ([4, 5], False)])
def test_tvm_binds_threads_to_the_fastest_processors(monkeypatch, tmp_path, fast, is_bound):
    for cpu in range(8):
        file = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq"
        file.parent.mkdir(parents=True)
        file.write_text(f"{2400000 if cpu in fast else 1800000}\n")
    monkeypatch.setattr(cores, "_allowed_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(cores, "Path", lambda name: tmp_path / name.lstrip("/"))
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 8)
    assert ("TVM_BIND_THREADS" not in thread_env(4)) == is_bound


def test_the_number_of_threads_is_said_to_tvm():
    assert thread_env(3)["TVM_NUM_THREADS"] == "3"
    assert thread_env()["TVM_NUM_THREADS"] == str(usable_physical_cores())
    with pytest.raises(InvalidOptionError, match="n_threads must be at least 1 but got 0"):
        thread_env(0)
