"""Runs from the command line, stopped at random moments again and again, and resumed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tuning.runs import journalled_trials, recorded_programs
from tvm_adaptive.measure_callback import read_journal
from tvm_adaptive.tuning.interrupts import EXIT_INTERRUPTED

N_STOPS = 20
TRIALS = 400
# A run begins to measure some 4 s after its start.
LONGEST_SEC = 12.0


def start(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tvm_adaptive", "tune", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def events(work_dir: Path, kind: str) -> list[dict[str, Any]]:
    path = work_dir / "journal.jsonl"
    if not path.exists():
        return []
    return [event for event in read_journal(path) if event["event"] == kind]


def orphans() -> set[psutil.Process]:
    """Return workers of this package whose parent is gone."""
    found = set()
    for process in psutil.process_iter(["cmdline", "ppid", "status"]):
        is_ours = "workers/main.py" in " ".join(process.info["cmdline"] or ())
        is_dead = process.info["status"] == psutil.STATUS_ZOMBIE
        if is_ours and process.info["ppid"] == 1 and not is_dead:
            found.add(process)
    return found


QUICK = """
[search]
n_trials_per_round = 4
[finish]
top_k = 1
max_task_sec = 0.5
"""


def test_a_request_to_end_while_the_model_is_read_ends_in_order(tmp_path: Path) -> None:
    text = "import time, pathlib\n\ndef make():\n    pathlib.Path('here').touch()\n"
    (tmp_path / "slow.py").write_text(f"{text}    time.sleep(60)\n")
    command = [sys.executable, "-m", "tvm_adaptive", "tune", "slow:make", "--store", "none"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        while not (tmp_path / "here").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == EXIT_INTERRUPTED


@pytest.mark.slow
def test_a_killed_run_goes_on_and_measures_nothing_twice(tmp_path: Path) -> None:
    work_dir, config = tmp_path / "run", tmp_path / "quick.toml"
    config.write_text(QUICK)
    process = start(
        "te:GMM",
        "--trials",
        "20",
        "--work-dir",
        str(work_dir),
        "--store",
        "none",
        "--config",
        str(config),
    )
    while not journalled_trials(work_dir) and process.poll() is None:
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert 0 < journalled_trials(work_dir) < 20
    assert workers
    assert psutil.wait_procs(workers, timeout=10)[1] == []

    assert start("--resume", str(work_dir)).wait(timeout=120) == 0
    assert journalled_trials(work_dir) == 20
    found = recorded_programs(work_dir)
    assert len(set(found)) == len(found) >= 20


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_stopped_at_random_moments_it_comes_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    work_dir, rng = tmp_path / "run", random.Random(int(number))
    others = orphans()  # of other runs on this machine
    arguments = ["te:GMM", "--trials", str(TRIALS), "--work-dir", str(work_dir), "--store", "none"]
    codes, counts = [], [0]
    for _ in range(N_STOPS):
        process = start(*arguments)
        end_sec = time.monotonic() + rng.uniform(0.0, LONGEST_SEC)
        while time.monotonic() < end_sec and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(number)
        codes.append(process.wait(timeout=120))
        counts.append(journalled_trials(work_dir))
        assert counts[-1] >= counts[-2], "a trial was lost"
        if counts[-1] or events(work_dir, "model"):
            arguments = ["--resume", str(work_dir)]
    assert counts[-1] > 0
    assert start(*arguments).wait(timeout=600) == 0
    # Not before Python has set its handlers, or after the end.
    expected = {-number, 0} if number == signal.SIGKILL else {-number, 0, 130}
    assert set(codes) <= expected
    assert journalled_trials(work_dir) == TRIALS
    found = recorded_programs(work_dir)
    assert len(found) >= TRIALS
    assert len(set(found)) == len(found), "a trial was measured twice"
    time.sleep(1.0)
    assert orphans() <= others
    assert list(temporary.iterdir()) == []
