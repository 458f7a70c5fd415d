from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from pathlib import Path

import cloudpickle
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.workers import forks
from tvm_adaptive.workers.forks import MAX_JOBS, run_in_forks
from tvm_adaptive.workers.pool import Step, WorkerPool

# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

PAUSE_SEC = 0.01


def wait_for(*paths: Path) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(PAUSE_SEC)


def wait_for_end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            time.sleep(PAUSE_SEC)


def note(path: Path) -> None:
    """Write this process's id, all of it at once."""
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").replace(path)


@pytest.mark.parametrize("n_processes", [1, 2, 5])
@pytest.mark.parametrize("n_jobs", [0, 1, 3, 40])
def test_each_job_runs_once(tmp_path: Path, n_jobs: int, n_processes: int) -> None:
    def job(number: int) -> None:
        with (tmp_path / str(number)).open("x") as file:
            file.write(str(number))

    run_in_forks(job, n_jobs, n_processes)
    assert {path.name for path in tmp_path.iterdir()} == set(map(str, range(n_jobs)))


def test_jobs_run_at_the_same_time_in_several_processes(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(3)]

    def job(number: int) -> None:
        note(paths[number])
        wait_for(*paths)

    run_in_forks(job, 3, 3)
    pids = {int(path.read_text()) for path in paths}
    assert len(pids) == 3
    assert os.getpid() in pids


@pytest.mark.parametrize("end", ["killed", "raises"])
def test_what_a_fork_leaves_undone_is_done_here(tmp_path: Path, end: str) -> None:
    own, reached = os.getpid(), tmp_path / "reached"

    def job(number: int) -> None:
        if os.getpid() == own:
            wait_for(reached)
            note(tmp_path / str(number))
            return
        reached.touch()
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("it broke")

    run_in_forks(job, 2, 2)
    assert [int((tmp_path / name).read_text()) for name in "01"] == [own, own]


def test_an_error_here_ends_the_forks(tmp_path: Path) -> None:
    own, path = os.getpid(), tmp_path / "fork"

    def job(_number: int) -> None:
        if os.getpid() == own:
            wait_for(path)
            raise ValueError("it broke")
        note(path)
        time.sleep(1000)

    with pytest.raises(ValueError, match="it broke"):
        run_in_forks(job, 2, 2)
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


def test_without_forks_all_jobs_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(forks.os, "fork", refuse)
    done: list[int] = []
    run_in_forks(done.append, 3, 3)
    assert done == [0, 1, 2]


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="n_processes must be at least 1"):
        run_in_forks(print, 1, 0)
    with pytest.raises(ValueError, match=f"at most {MAX_JOBS} but got {MAX_JOBS + 1}"):
        run_in_forks(print, MAX_JOBS + 1, 1)


def test_the_most_jobs_fit(tmp_path: Path) -> None:
    def job(number: int) -> None:
        (tmp_path / str(number % 7)).touch()

    run_in_forks(job, MAX_JOBS, 2)
    assert len(list(tmp_path.iterdir())) == 7


def hang_in_forks(folder: str) -> None:
    def job(number: int) -> None:
        note(Path(folder, str(number)))
        time.sleep(1000)

    run_in_forks(job, 2, 2)


def test_forks_end_with_the_worker(tmp_path: Path) -> None:
    paths = [tmp_path / "0", tmp_path / "1"]
    step = Step("hanging", hang_in_forks, (str(tmp_path),), math.inf)
    with contextlib.closing(WorkerPool(1)) as pool:
        outcomes = pool.stream([pool.plan_of(step)], is_over=lambda: all(map(Path.exists, paths)))
        assert list(outcomes) == []
        for path in paths:
            wait_for_end(int(path.read_text()))
