"""What ends a run early: not the search, but what the machine cannot do now."""

from __future__ import annotations

import errno
import json
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.journals import MemoryJournal
from tests.tuning.observers import Notes
from tests.tuning.runs import QUICK
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.tuning import deploy
from tvm_adaptive.tuning import session as session_file
from tvm_adaptive.tuning.config import DEFAULT, MeasureConfig
from tvm_adaptive.tuning.session import (
    LEAST_FREE_BYTES,
    RunOptions,
    Session,
    check_disk_space,
    checked_target,
    open_session,
)
from tvm_adaptive.values.run_folder import RECORD_FILE, WORKLOAD_FILE
from tvm_adaptive.workers.scratch import OWNER_FILE, ScratchFolder


class FailingJournal(MemoryJournal):
    """A journal that may have lost a line."""

    def __init__(self, failure: OSError | None = None) -> None:
        super().__init__()
        self.failure = failure


@pytest.fixture
def set_free_bytes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that says how much room the disk has left; None if it does not answer."""

    def set_to(free: int | None) -> None:
        def usage(_folder: Any) -> Any:
            if free is None:
                raise OSError(errno.ESTALE, "Stale file handle")
            return SimpleNamespace(free=free)

        monkeypatch.setattr(session_file.shutil, "disk_usage", usage)

    set_to(LEAST_FREE_BYTES)
    return set_to


@pytest.mark.parametrize(
    ("cause", "problem", "fix"),
    [
        ("journal", "no space is left on the device", "Make room"),
        ("disk", "only 31 MiB are left on the disk of ", "Make room"),
        ("server", "does not answer (Stale file handle)", "Make room"),
        ("machine", "no process could be started", "Fix that"),
    ],
)
def test_what_the_machine_cannot_do_ends_a_run_that_can_be_resumed(
    make_session: Any, set_free_bytes: Any, cause: str, problem: str, fix: str
) -> None:
    failure = (
        OSError(errno.ENOSPC, "no space is left on the device") if cause == "journal" else None
    )
    observer, journal = Notes(), FailingJournal(failure)
    session: Session = make_session(observer=observer, journal=journal)
    if cause in ("disk", "server"):
        set_free_bytes(LEAST_FREE_BYTES - 2**20 if cause == "disk" else None)
    elif cause == "machine":
        session.machine_failed(problem)
    for _ in range(2):  # it is said once
        assert session.should_stop()
        (note,) = observer.notes
    assert problem in note
    assert note.endswith(
        f"; the run ends here. {fix}, then continue with --resume {session.work_dir}"
    )
    assert session.budget.interrupted
    assert problem in session.budget.machine_failure
    messages = [event["message"] for event in journal.of("error")]
    assert messages == ([problem] if cause == "machine" else [])
    session.budget.interrupt()  # by a signal
    assert session.budget.machine_failure == ""


def test_a_disk_that_lets_nothing_run_is_refused(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_session().work_dir
    flags = SimpleNamespace(f_flag=os.ST_NOEXEC, f_bavail=1 << 20, f_blocks=1 << 20, f_bfree=0)
    flags.f_frsize = 4096
    monkeypatch.setattr(os, "statvfs", lambda _folder: flags)
    with pytest.raises(InvalidOptionError, match="mounted noexec"):
        check_disk_space(folder)
    check_disk_space(folder, runs_here=False)  # a farm's devices run them


@pytest.mark.parametrize(
    ("devices", "names", "text"),
    [
        ("0,1", ["A", None], "has no cuda:1"),
        ("0,1", ["A", "B"], "cuda:0 is A, cuda:1 is B"),
        ("0,1", ["A", "A"], None),
        ("0", [None], "has no cuda:0.*--tracker"),
        ("0", ["A"], None),
    ],
)
def test_gpus_are_there_and_of_one_kind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: str,
    names: list[str | None],
    text: str | None,
) -> None:
    monkeypatch.setattr(session_file, "gpu_name", lambda _kind, index: names[index])
    target = {"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024}
    config = DEFAULT.replace(measure=MeasureConfig(devices=devices))
    options = RunOptions(
        what="gmm", work_dir=tmp_path / "run", target=target, trials=1, config=config
    )
    with nullcontext() if text is None else pytest.raises(InvalidOptionError, match=text):
        checked_target(options)


def test_a_run_begins_beside_stocks_database_and_goes_on_beside_its_own_files(
    tmp_path: Path,
) -> None:
    for name in (WORKLOAD_FILE, RECORD_FILE):
        (tmp_path / name).touch()
    (tmp_path / "logs").mkdir()
    options = RunOptions(what="net", work_dir=tmp_path, trials=1, config=QUICK)
    for _ in range(2):
        with open_session(options, server=Mock(), libraries=["net.so"]) as session:
            assert session.work_dir == tmp_path.resolve()
        for name in ("final", "final.new", "artifacts"):
            (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / "net.so").touch()


def test_with_room_for_it_a_run_goes_on(make_session: Any, set_free_bytes: Any) -> None:
    observer = Notes()
    session = make_session(observer=observer, journal=FailingJournal())
    assert not session.should_stop()
    check_disk_space(session.work_dir)
    assert observer.notes == []
    set_free_bytes(LEAST_FREE_BYTES - 2**20)
    with pytest.raises(InvalidOptionError, match="no room for a run: only 31 MiB"):
        check_disk_space(session.work_dir / "not" / "there")


@pytest.mark.parametrize("is_run", [True, False])
def test_scratch_folders_of_another_node_are_removed_by_who_has_the_directory(
    tmp_path: Path, is_run: bool
) -> None:
    mine, users, left = (
        ScratchFolder("network", tmp_path),
        tmp_path / "tvm-adaptive-main",
        tmp_path / "tvm-adaptive-network-x",
    )
    owner = json.loads((mine.path / OWNER_FILE).read_text())
    users.mkdir()
    left.mkdir()
    elsewhere = {**owner, "host": "other", "boot": "another", "namespace": "pid:[1]"}
    (left / OWNER_FILE).write_text(json.dumps(elsewhere))
    options = RunOptions(what="net", work_dir=tmp_path, trials=1, config=QUICK)
    opened: AbstractContextManager[Any] = (
        open_session(options, server=Mock())
        if is_run
        else deploy._opened(tmp_path, QUICK, None, None, Mock())
    )
    with opened:
        assert not left.exists()
        assert mine.path.exists()
        assert users.exists()
    mine.remove()
