"""Temporary folders end with their owner, or with the next one's beginning."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tvm_adaptive.workers import main as worker_main
from tvm_adaptive.workers.scratch import OWNER_FILE, Owner, ScratchFolder, remove_abandoned


def make_in_a_process(place: Path, end: str) -> Path:
    """Have a process make a folder with something in it, and end."""
    program = f"""
        import os, runpy, signal
        # The whole package takes seconds.
        runpy.run_path({worker_main.__file__!r})["defer_package"]("tvm_adaptive")
        from tvm_adaptive.workers.scratch import ScratchFolder
        folder = ScratchFolder("test", {str(place)!r})
        (folder.path / "below").mkdir()
        (folder.path / "below" / "file").write_text("x")
        print(folder.path, flush=True)
        {end}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return Path(done.stdout.strip())


@pytest.mark.parametrize(
    ("end", "stays"),
    [
        pytest.param("folder.remove()", False, marks=pytest.mark.slow),
        pytest.param("del folder", False, marks=pytest.mark.slow),
        ("pass", False),
        pytest.param("raise SystemExit(1)", False, marks=pytest.mark.slow),
        ("os.kill(os.getpid(), signal.SIGKILL)", True),
    ],
)
def test_a_folder_ends_with_its_owner(tmp_path: Path, end: str, stays: bool) -> None:
    folder = make_in_a_process(tmp_path, end)
    assert folder.name.startswith("tvm-adaptive-test-")
    assert folder.exists() == stays


def test_the_next_one_removes_what_the_dead_have_left(tmp_path: Path) -> None:
    left = make_in_a_process(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert (left / "below" / "file").exists()
    (tmp_path / "tvm-adaptive-test-nobodys").mkdir()
    (tmp_path / "somebody-elses").mkdir()
    living = ScratchFolder("test", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(
        [living.path, tmp_path / "somebody-elses", tmp_path / "tvm-adaptive-test-nobodys"]
    )
    second = ScratchFolder("test", tmp_path)
    assert living.path.exists()
    living.remove()
    living.remove()
    second.remove()
    assert not living.path.exists()


@pytest.mark.parametrize(
    ("change", "is_gone"),
    [
        ({}, False),
        ({"started": "1"}, True),  # its number is another process's now
        ({"pid": 2**22 + 1}, True),  # beyond what Linux gives
        ({"pid": 2**22 + 1, "host": "elsewhere"}, False),
        ({"pid": 2**22 + 1, "boot": "another"}, False),
        ({"pid": 2**22 + 1, "namespace": "pid:[1]"}, False),
        ({"pid": 2**22 + 1, "boot": ""}, False),
        ({"pid": 2**22 + 1, "started": ""}, False),
    ],
    ids=str,
)
def test_only_an_owner_that_is_known_to_be_gone_is(
    tmp_path: Path, change: dict[str, object], is_gone: bool
) -> None:
    folder = ScratchFolder("test", tmp_path)
    owner = json.loads((folder.path / OWNER_FILE).read_text())
    assert owner["pid"] == os.getpid()
    assert Owner(**{**owner, **change}).is_gone() == is_gone
    (folder.path / OWNER_FILE).write_text(json.dumps({**owner, **change}))
    remove_abandoned(tmp_path)
    assert folder.path.exists() != is_gone


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": 1}', "7", "\0"])
def test_a_folder_that_names_no_owner_stays(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "tvm-adaptive-test-x"
    folder.mkdir()
    (folder / OWNER_FILE).write_text(text)
    remove_abandoned(tmp_path)
    assert folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_folder_stays(tmp_path: Path) -> None:
    left = make_in_a_process(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    os.chown(left, 54321, 54321)
    remove_abandoned(tmp_path)
    assert left.exists()
    os.chown(left, os.geteuid(), os.getegid())
    remove_abandoned(tmp_path)
    assert not left.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    left = make_in_a_process(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (left / "link").symlink_to(precious)
    (tmp_path / "tvm-adaptive-test-link").symlink_to(precious)
    remove_abandoned(tmp_path)
    assert not left.exists()
    assert (precious / "file").exists()


def test_what_is_still_being_written_is_removed(tmp_path: Path) -> None:
    folder = ScratchFolder("test", tmp_path)

    def write_late() -> None:
        for number in range(200):
            with contextlib.suppress(FileNotFoundError):
                (folder.path / f"late{number}").write_text("x")

    thread = threading.Thread(target=write_late)
    thread.start()
    folder.remove()
    thread.join()
    assert not folder.path.exists()
