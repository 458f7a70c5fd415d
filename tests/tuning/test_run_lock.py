from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tuning.runs import journalled_trials, recorded_programs
from tvm_adaptive.cli import main
from tvm_adaptive.errors import InvalidOptionError, WorkDirInUseError
from tvm_adaptive.tuning import run_lock
from tvm_adaptive.tuning.run_lock import LOCK_FILE, owned
from tvm_adaptive.workers import main as worker_main
from tvm_adaptive.workers.scratch import Owner

# Own a directory, have a child that outlives us, say so, and wait.
HOLDER = f"""
import runpy
runpy.run_path({worker_main.__file__!r})["defer_package"]("tvm_adaptive")  # TVM is not needed
import pathlib, subprocess, sys, time
from tvm_adaptive.tuning.run_lock import owned
with owned(pathlib.Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that owns the test's directory, and whose child runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    os.kill(child, signal.SIGKILL)


def leave_lock(work_dir: Path, **changes: object) -> None:
    """Write the lock file of an owner that is another one."""
    fields = {**dataclasses.asdict(Owner.of(os.getpid())), "since_unix_sec": 1e9}
    (work_dir / LOCK_FILE).write_text(json.dumps({**fields, **changes}))


def test_the_second_comer_learns_who_the_first_one_is(tmp_path: Path) -> None:
    with owned(tmp_path):
        who = f"process {os.getpid()} on {socket.gethostname()}, since 2"
        with pytest.raises(WorkDirInUseError, match=who), owned(tmp_path):
            pytest.fail("there were two owners")
        assert (tmp_path / LOCK_FILE).is_file()
    assert list(tmp_path.iterdir()) == []
    with owned(tmp_path):
        pass


def test_an_error_gives_the_directory_back(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), owned(tmp_path):
        raise RuntimeError
    with owned(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_which_nothing_began_is_removed(tmp_path: Path) -> None:
    with owned(tmp_path / "runs" / "a"):
        assert (tmp_path / "runs" / "a").is_dir()
    assert list(tmp_path.iterdir()) == []
    with owned(tmp_path / "runs" / "a") as owner:
        (owner.work_dir / "journal.jsonl").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "a", "journal.jsonl"]


def test_a_living_run_is_left_alone_from_the_command_line(
    tmp_path: Path, holder: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "journal.jsonl"
    journal.write_text('{"event":"journal","version":1}\n{"event":"torn')
    for arguments in (["--resume", str(tmp_path)], ["te:GMM", "--work-dir", str(tmp_path)]):
        assert main(["tune", *arguments, "--trials", "4", "--store", "none"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"A run is in progress in {tmp_path} (process {holder.pid} on " in line
    assert journal.read_text().endswith("torn")
    assert {path.name for path in tmp_path.iterdir()} == {"journal.jsonl", LOCK_FILE}


def test_a_killed_owner_holds_nothing_though_its_child_lives(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.kill()
    holder.wait()
    assert (tmp_path / LOCK_FILE).is_file()
    with owned(tmp_path):
        assert f'"pid": {os.getpid()}' in (tmp_path / LOCK_FILE).read_text()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_lock_on_a_file_that_its_owner_has_removed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one ends between the second one's opening of the file and its lock."""
    first, flock = run_lock.Ownership(tmp_path), run_lock.fcntl.flock

    def late(file: int, operation: int) -> None:
        first.release()
        flock(file, operation)

    monkeypatch.setattr(run_lock.fcntl, "flock", late)
    with owned(tmp_path):
        assert (tmp_path / LOCK_FILE).is_file()
        with pytest.raises(WorkDirInUseError), owned(tmp_path):
            pytest.fail("there were two owners")
    assert list(tmp_path.iterdir()) == []


class TestWhereLocksDoNotHold:
    """On a network file system, what the lock file says decides."""

    @pytest.fixture(autouse=True)
    def _on_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run_lock, "file_system_of", lambda path: "nfs4")

    def test_one_owner_at_a_time(self, tmp_path: Path) -> None:
        with (
            owned(tmp_path),
            pytest.raises(WorkDirInUseError, match="wait for it, end it"),
            owned(tmp_path),
        ):
            pytest.fail("there were two owners")
        assert list(tmp_path.iterdir()) == []

    def test_another_host_may_be_alive(self, tmp_path: Path) -> None:
        leave_lock(tmp_path, host="elsewhere")
        with pytest.raises(WorkDirInUseError, match=f"on elsewhere.*delete {tmp_path}"):
            run_lock.Ownership(tmp_path)
        assert (tmp_path / LOCK_FILE).is_file()

    @pytest.mark.parametrize("changes", [{"namespace": "pid:[1]"}, {"boot": "another"}])
    def test_another_container_of_the_same_name_may_be_alive(
        self, tmp_path: Path, changes: dict[str, object]
    ) -> None:
        leave_lock(tmp_path, pid=2**22 + 1, **changes)
        with pytest.raises(WorkDirInUseError, match=f"delete {tmp_path}"):
            run_lock.Ownership(tmp_path)

    def test_of_two_that_follow_one_gets_the_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        leave_lock(tmp_path, pid=2**22 + 1)
        read, followers = run_lock._holder, []

        def slowly(path: Path) -> object:
            """Between reading the file and removing it, another process follows."""
            found = read(path)
            if not followers:
                followers.append(None)
                followers.append(run_lock.Ownership(tmp_path))
            return found

        monkeypatch.setattr(run_lock, "_holder", slowly)
        with pytest.raises(WorkDirInUseError):
            run_lock.Ownership(tmp_path)
        followers[1].release()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("changes", [{"pid": 2**22 + 1}, {"started": "1"}])
    def test_a_dead_owner_is_followed(self, tmp_path: Path, changes: dict[str, object]) -> None:
        leave_lock(tmp_path, **changes)
        with owned(tmp_path):
            pass
        assert list(tmp_path.iterdir()) == []

    def test_a_lock_that_names_nobody_is_believed(self, tmp_path: Path) -> None:
        (tmp_path / LOCK_FILE).write_text("")
        with pytest.raises(WorkDirInUseError, match="another process"):
            run_lock.Ownership(tmp_path)


def test_where_the_system_has_no_locks_the_file_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)
    with owned(tmp_path), pytest.raises(WorkDirInUseError):
        run_lock.Ownership(tmp_path)
    leave_lock(tmp_path, host="elsewhere")
    with pytest.raises(WorkDirInUseError, match="delete"):
        run_lock.Ownership(tmp_path)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(InvalidOptionError, match="cannot be written"):
        run_lock.Ownership(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_two_that_resume_one_goes_on(tmp_path: Path) -> None:
    work_dir = tmp_path / "run"
    tune = [sys.executable, "-m", "tvm_adaptive", "tune", "--store", "none"]
    first = [*tune, "te:GMM", "--trials", "8", "--work-dir", str(work_dir)]
    assert subprocess.run(first, capture_output=True, check=False).returncode == 0
    again = [*tune, "--resume", str(work_dir), "--trials", "64"]
    pair = [subprocess.Popen(again, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=500)[1] for process in pair]
    assert sorted(process.returncode for process in pair) == [0, 2]
    (refused,) = (text for text, each in zip(errors, pair, strict=True) if each.returncode == 2)
    (going_on,) = (each for each in pair if each.returncode == 0)
    assert f"A run is in progress in {work_dir} (process {going_on.pid} on " in refused
    assert journalled_trials(work_dir) == 64
    found = recorded_programs(work_dir)
    assert len(set(found)) == len(found) >= 64
    assert not list(work_dir.glob("*.damaged"))
    assert not (work_dir / LOCK_FILE).exists()
