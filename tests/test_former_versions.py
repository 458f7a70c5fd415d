"""Runs, stores, databases and configurations of former versions are read, resumed and applied.

``fixtures/runs-1.tar.xz`` was written before runs kept verdicts and locks of their own,
``runs-2.tar.xz`` before the package was laid out anew; both by the command itself, for a
target that any x86-64 processor can run: a finished run with a store, and one that was
killed with SIGKILL.
"""

from __future__ import annotations

import platform
import tarfile
from pathlib import Path

import pytest
import tomllib

from tests.tuning.runs import journalled_trials
from tvm_adaptive._tvm import TVM_VERSION
from tvm_adaptive.cli import main
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.measure_callback.journal import read_journal
from tvm_adaptive.report import read_run, write_report
from tvm_adaptive.tuning.config_file import read_config, write_config
from tvm_adaptive.workers.environment import processor_name

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the runs are of another processor"
)
FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("runs-*.tar.xz"))
N_TRIALS = 24
RECORDED_ON = "AMD EPYC (25 17 1)"
# TVM 0.26 does not know the programs that 0.27 has written.
KNOWS_PROGRAMS = not str(TVM_VERSION).startswith("0.26.")
needs_programs = pytest.mark.skipif(not KNOWS_PROGRAMS, reason="TVM 0.27 wrote the programs")


@pytest.fixture(params=FIXTURES, ids=lambda path: path.name.partition(".")[0])
def former(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    # A run continues only where its times were taken: on this machine, as it were.
    for journal in tmp_path.glob("*/journal.jsonl"):
        journal.write_text(journal.read_text().replace(RECORDED_ON, processor_name()))
    return tmp_path


@needs_programs
def test_a_finished_run_is_shown(former: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(former / "finished")]) == 0
    assert "main" in capsys.readouterr().out


def test_a_finished_run_is_reported(former: Path) -> None:
    history = read_run(former / "finished")
    assert sum(len(task.latencies_ms) for task in history.tasks.values()) == N_TRIALS
    page = write_report([history], former / "page.html")
    assert "te:GMM" in page.read_text()


@needs_programs
def test_an_interrupted_run_is_resumed(former: Path) -> None:
    folder = former / "interrupted"
    n_before, events = journalled_trials(folder), list(read_journal(folder / "journal.jsonl"))
    assert n_before > 0
    arguments = ["--resume", str(folder), "--trials", str(n_before + 4), "--store", "none"]
    assert main(["tune", *arguments]) == 0
    assert journalled_trials(folder) == n_before + 4
    after = list(read_journal(folder / "journal.jsonl"))
    assert after[: len(events)] == events
    restored = [event for event in after if event["event"] == "restored"]
    assert restored[-1]["n_samples"] > 0
    assert (folder / "main.so").is_file()


@needs_programs
def test_a_finished_run_is_applied(former: Path) -> None:
    out = former / "deploy"
    assert main(["apply", str(former / "finished"), "--store", "none", "--out", str(out)]) == 0
    assert list(out.glob("*.so"))


@pytest.mark.skipif(KNOWS_PROGRAMS, reason="this version of TVM knows the programs")
@pytest.mark.parametrize("command", ["show", "apply"])
def test_what_another_tvm_has_written_is_refused(
    command: str,
    former: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(former)  # where "apply" writes its log
    assert main([command, str(former / "finished")]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert f"error: TVM {TVM_VERSION} cannot read the records in " in line


def test_a_store_is_read(former: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = former / "store.db"
    assert main(["db", "--store", str(store), "stats"]) == 0
    assert str(N_TRIALS) in capsys.readouterr().out
    with RecordStore(store) as opened:
        (task,) = opened.tasks()
        assert len(opened.seconds(task)) > 0
        assert opened.n_left_out == 0


def test_the_store_of_a_killed_run_is_imported_and_left_as_it_is(former: Path) -> None:
    folder = former / "interrupted"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "records.db-wal" in before
    store = former / "new.db"
    assert main(["db", "--store", str(store), "import", str(folder / "records.db")]) == 0
    with RecordStore(store) as opened:
        (task,) = opened.tasks()
        assert len(opened.latest(task)) == journalled_trials(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@needs_programs
def test_a_json_database_is_imported(former: Path) -> None:
    store = former / "new.db"
    folder = former / "finished" / "final"
    assert main(["db", "--store", str(store), "import", str(folder)]) == 0
    with RecordStore(store) as opened:
        assert len(opened.tasks()) == 1


def test_a_configuration_is_read(former: Path) -> None:
    path = former / "config.toml"
    written = tomllib.loads(path.read_text())
    if written["search"].get("proposer") == "distilled":  # its former name
        written["search"]["proposer"] = "surrogate"
    read = tomllib.loads(write_config(read_config(path)))
    assert set(read) >= set(written)
    for name, value in written.items():
        assert read[name] | value == read[name] if isinstance(value, dict) else read[name] == value
