from __future__ import annotations

import contextlib
import json
import math
import platform
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.tuning.observers import NoObserver, Notes
from tests.tuning.runs import QUICK, recorded_programs
from tvm_adaptive import tune, tune_tir
from tvm_adaptive._tvm import IRModule, te_workload
from tvm_adaptive.cli import main
from tvm_adaptive.cli.display import Display
from tvm_adaptive.database.location import RUN_STORE
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import InvalidOptionError, OtherMachineError, OtherModelError
from tvm_adaptive.measure_callback import read_journal
from tvm_adaptive.measure_callback.history import read_history
from tvm_adaptive.measure_callback.journal import Journal
from tvm_adaptive.measure_callback.progress import RunProgress
from tvm_adaptive.report.history import RunHistory
from tvm_adaptive.tuning import target as targets
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.outcome import TuneReport
from tvm_adaptive.tuning.resume import resume
from tvm_adaptive.tuning.session import RunOptions, open_session


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TuneReport:
    """Return the report of a run that has come to its end; it resumed one that was not there."""
    folder = tmp_path_factory.mktemp("finished")
    return tune("te:GMM", work_dir=folder, trials=4, seed=3, config=QUICK, resume=True)


@pytest.fixture
def work_dir(finished: TuneReport, tmp_path: Path) -> Path:
    """Return a copy of the finished run, to write there."""
    return Path(shutil.copytree(finished.work_dir, tmp_path / "run"))


def attempts(work_dir: Path) -> list[list[dict[str, Any]]]:
    """Return the events of each attempt."""
    found: list[list[dict[str, Any]]] = []
    for event in read_journal(work_dir / "journal.jsonl"):
        if event["event"] == "journal":
            found.append([])
        found[-1].append(event)
    return found


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


class Watcher(NoObserver):
    """Keeps a history, as a screen does."""

    def __init__(self) -> None:
        self.history = RunHistory(keeps_all=False)

    def event(self, event: dict[str, Any]) -> None:
        self.history.add(event)


@pytest.mark.parametrize("is_resumed", [True, False])
def test_only_a_resumed_run_has_trials_and_seconds_of_earlier_attempts(
    tmp_path: Path, is_resumed: bool
) -> None:
    with contextlib.closing(Journal(tmp_path / "journal.jsonl")) as journal:
        journal.write("run", what="net", resumed=False, run_id="a")
        journal.write("measured", task="a", latencies_ms=[2.0, 1.0], weighted_ms=1.0)
        journal.write("stage", stage="search", seconds=50.0)
    options = RunOptions(
        what="net",
        work_dir=tmp_path,
        trials=4,
        config=QUICK,
        observer=(watcher := Watcher()),
        resume=is_resumed,
    )
    with open_session(options, server=Mock()) as session, session.stage("search"):
        assert watcher.history.n_trials == (2 if is_resumed else 0)
        assert watcher.history.n_attempts == (2 if is_resumed else 1)
    assert (session.stage_secs["search"] > 50.0) is is_resumed
    assert watcher.history.stage_secs == read_history(tmp_path / "journal.jsonl").stage_secs
    assert watcher.history.stage_secs == pytest.approx(session.stage_secs)


@pytest.mark.slow
def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    # As many as a search makes before it asks the model.
    first = tune("te:GMM", work_dir=tmp_path, trials=16, seed=3, config=QUICK)
    observer = Notes()
    second = resume(tmp_path, trials=24, observer=observer)
    assert (first.n_trials, second.n_trials) == (16, 24)
    assert second.elapsed_sec > first.elapsed_sec
    assert len(set(recorded_programs(tmp_path))) == len(recorded_programs(tmp_path)) == 24

    before, after = attempts(tmp_path)
    assert any("resumes after 16 trials" in note for note in observer.notes)
    # The model knows what it knew, to the sample, before anything new was measured.
    (restored,) = of_kind(after, "restored")
    assert restored["n_samples"] == 16
    kinds = [event["event"] for event in after]
    assert kinds.index("fit") < kinds.index("measured")
    n_failed = of_kind(before, "measured")[-1]["n_errors"]
    assert of_kind(after, "fit")[0]["n_samples"] == 16 - n_failed
    # The scheduler warms nothing up again.
    assert {slot["reason"] for slot in of_kind(before, "slot")} >= {"warm-up"}
    assert "warm-up" not in {slot["reason"] for slot in of_kind(after, "slot")}
    reported = of_kind(after, "run")[0]
    assert reported["config"]["search"] == of_kind(before, "run")[0]["config"]["search"]
    assert reported["seed"] != of_kind(before, "run")[0]["seed"]


def test_resuming_nothing_begins(finished: TuneReport) -> None:
    assert finished.n_trials == 4


def test_a_finished_run_measures_nothing_and_says_so(
    finished: TuneReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = Notes()
    again = resume(finished.work_dir, observer=observer)
    assert len(attempts(finished.work_dir)) == 1
    assert "has come to its end" in observer.notes[0]
    assert again == finished
    assert "--until-latency" not in observer.notes[0]
    # Of a folder that was moved, or mounted elsewhere, files are named where they are now.
    moved = finished.work_dir.with_name("moved")
    finished.work_dir.rename(moved)
    assert resume(moved).work_dir == moved.resolve()
    assert resume(moved).database_dir.is_dir()
    moved.rename(finished.work_dir)
    # A search that ended on a plateau goes on where that is wanted.
    given: list[RunOptions] = []
    monkeypatch.setattr(
        "tvm_adaptive.tuning.resume.run_named",
        lambda options, *_: given.append(options) or finished,
    )
    resume(finished.work_dir, use_all=True)
    assert [each.config.use_all for each in given] == [True]


def test_of_a_run_that_reached_its_goal_the_goal_is_named(work_dir: Path) -> None:
    resaid(work_dir, "run", until_ms=1e6)
    observer = Notes()
    resume(work_dir, observer=observer)
    assert (
        "more --trials, or, if it has reached its goal, a shorter --until-latency"
        in observer.notes[0]
    )


def test_a_report_survives_its_journal(finished: TuneReport) -> None:
    assert TuneReport.from_fields(json.loads(json.dumps(finished.as_fields()))) == finished
    fields = {**finished.as_fields(), "comparison": None, "weighted_sec": None, "event": "report"}
    assert math.isinf(TuneReport.from_fields(fields).weighted_sec)


@pytest.mark.slow
def test_a_model_that_was_given_in_python_is_resumed_in_python(tmp_path: Path) -> None:
    mod = IRModule({"main": te_workload("GMM")["main"]})
    tune_tir(mod, work_dir=tmp_path, trials=4, seed=3, config=QUICK)
    with pytest.raises(
        InvalidOptionError, match=r"given its model in Python.*tvm_adaptive\.compile "
    ):
        resume(tmp_path)
    report = tune_tir(mod, work_dir=tmp_path, trials=8, seed=4, config=QUICK, resume=True)
    assert report.n_trials == 8
    (restored,) = of_kind(attempts(tmp_path)[1], "restored")
    assert restored["n_samples"] == 4


def resaid(work_dir: Path, kind: str, **fields: object) -> None:
    """Change what the events of one kind in a journal say; None takes a field away."""
    path = work_dir / "journal.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        if event["event"] == kind:
            event.update(fields)
            for name in [name for name, value in fields.items() if value is None]:
                del event[name]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.slow
def test_another_machines_run_is_refused_and_measured_anew_where_allowed(tmp_path: Path) -> None:
    tune("te:GMM", work_dir=tmp_path, trials=8, seed=3, config=QUICK)
    before = recorded_programs(tmp_path)
    (reported,) = of_kind(attempts(tmp_path)[0], "run")
    assert reported["device"]
    resaid(tmp_path, "run", device="Z80, 1 cores")
    journal = (tmp_path / "journal.jsonl").read_bytes()
    message = (
        "taken elsewhere or for another target .device Z80, 1 cores, here .*--allow-other-machine"
    )
    for again in (
        lambda: resume(tmp_path, trials=12),
        lambda: resume(tmp_path),  # it has come to its end, elsewhere
        lambda: tune("te:GMM", work_dir=tmp_path, trials=4, config=QUICK),
    ):
        with pytest.raises(OtherMachineError, match=message):
            again()
    assert (tmp_path / "journal.jsonl").read_bytes() == journal
    assert recorded_programs(tmp_path) == before

    observer = Notes()
    report = resume(tmp_path, trials=12, observer=observer, allow_other_machine=True)
    assert report.n_trials == 12
    _, after = attempts(tmp_path)
    # No time from elsewhere: not in the model, the task scheduler, or among the records.
    assert of_kind(after, "restored") == []
    first = of_kind(after, "measured")[0]
    assert first["n_trials"] == first["n_candidates"]
    assert any(slot["reason"] == "warm-up" for slot in of_kind(after, "slot"))
    assert len(recorded_programs(tmp_path)) == 12
    # They are kept, and the best of them were measured again, first of all.
    folder = tmp_path / "other-machine-1"
    assert recorded_programs(folder) == before
    assert (folder / RUN_STORE).is_file()
    assert (folder / "final").is_dir()
    assert any(str(folder) in note for note in observer.notes)
    assert of_kind(after, "hinted")[0]["tasks"] == ["main"]
    assert set(before) & set(recorded_programs(tmp_path))

    # From now on it is this machine's run, and what was spent elsewhere is not counted.
    history = read_history(tmp_path / "journal.jsonl")
    assert history.n_trials == 12
    assert history.spent_sec == pytest.approx(after[-1]["time_sec"], abs=1.0)
    assert resume(tmp_path).n_trials == 12


@pytest.mark.slow
def test_a_named_store_that_was_set_aside_is_opened_anew(tmp_path: Path) -> None:
    config = QUICK.replace(store=str(tmp_path / RUN_STORE))
    tune("te:GMM", work_dir=tmp_path, trials=8, seed=3, config=config)
    resaid(tmp_path, "run", device="Z80, 1 cores")
    resume(tmp_path, trials=12, allow_other_machine=True)
    n_trials = {}
    for folder in (tmp_path, tmp_path / "other-machine-1"):
        with RecordStore(folder / RUN_STORE) as store:
            n_trials[folder.name] = sum(each.n_trials for each in store.stats())
    assert n_trials == {tmp_path.name: 12, "other-machine-1": 8}


def test_another_targets_run_is_refused(work_dir: Path) -> None:
    run = read_history(work_dir / "journal.jsonl").run
    target = {**run["target"], "mcpu": "x86-64-v2"}
    message = rf"another target .target's mcpu {run['target']['mcpu']}, here x86-64-v2.*--allow"
    with pytest.raises(OtherMachineError, match=message):
        tune("te:GMM", work_dir=work_dir, trials=4, config=QUICK, target=target)
    # Where it is allowed, the times of the one before count for nothing from then on.
    with open(work_dir / "journal.jsonl", "a") as file:
        for event in ({"event": "journal"}, {**run, "resumed": True, "target": target}):
            file.write(json.dumps(event) + "\n")
    assert read_history(work_dir / "journal.jsonl").n_trials == 0


def test_a_machine_that_cannot_run_its_code_does_not_continue_a_run(
    work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the names are of x86-64's instruction sets")
    run = read_history(work_dir / "journal.jsonl").run
    resaid(work_dir, "run", target={**run["target"], "mcpu": "znver4", "mattr": []})
    monkeypatch.setattr(targets, "processor_flags", lambda: {"avx", "avx2", "fma"})
    with pytest.raises(InvalidOptionError, match=r"uses avx512.*is continued on machines") as error:
        resume(work_dir, trials=8, allow_other_machine=True)
    assert "--tracker" not in str(error.value)


@pytest.mark.slow
def test_a_journal_that_does_not_say_where_and_what_goes_on_with_a_note(work_dir: Path) -> None:
    resaid(work_dir, "run", device=None)
    resaid(work_dir, "model", content=None)
    observer = Notes()
    assert resume(work_dir, trials=8, observer=observer).n_trials == 8
    assert sum("the journal does not say" in note for note in observer.notes) == 2
    assert len(recorded_programs(work_dir)) == 8


def test_another_model_or_version_of_tvm_is_refused(work_dir: Path) -> None:
    journal = (work_dir / "journal.jsonl").read_bytes()
    with pytest.raises(OtherModelError, match="its operators, shapes or types changed"):
        tune("te:C1D", work_dir=work_dir, trials=8, config=QUICK, resume=True)
    with pytest.raises(OtherModelError):
        tune_tir(te_workload("C1D"), work_dir=work_dir, trials=8, config=QUICK, resume=True)
    assert (work_dir / "journal.jsonl").read_bytes() == journal
    resaid(work_dir, "run", tvm="0.25.0")
    with pytest.raises(OtherMachineError, match=r"TVM 0\.25\.0, here 0\."):
        resume(work_dir, trials=8)


@pytest.mark.slow
def test_without_its_own_store_a_run_still_goes_on(work_dir: Path) -> None:
    (work_dir / RUN_STORE).write_bytes(b"no database at all, but long enough to be one" * 9)
    observer = Notes()
    assert resume(work_dir, trials=8, observer=observer).n_trials == 8
    assert any("resumed without its cost model" in note for note in observer.notes)


@pytest.mark.slow
def test_what_the_run_taught_the_model_is_not_taught_twice(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    config = QUICK.replace(store=store)
    tune("te:GMM", work_dir=tmp_path / "run", trials=8, seed=3, config=config)
    resume(tmp_path / "run", trials=12)
    _, after = attempts(tmp_path / "run")
    (recalled,) = of_kind(after, "recalled")
    assert recalled["n_samples"] == 0
    assert set(recalled["n_trials"].values()) <= {0}
    with RecordStore(store) as known:
        assert known.stats()[0].n_trials == 12


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--resume", "nowhere"], "There is no run in nowhere"),
        (["te:GMM", "--resume", "."], "leave out WHAT"),
        (["--resume", ".", "--seed", "1", "--no-prepack"], "leave out --seed, --no-prepack."),
    ],
)
def test_bad_input(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_password_is_asked_for_again(tmp_path: Path) -> None:
    events = [
        {"event": "journal", "time_sec": 0.0, "version": 1},
        {
            "event": "run",
            "time_sec": 0.0,
            "config": {"store": "postgresql+psycopg://me:***@host/db"},
            "target": {"kind": "llvm", "num-cores": 1},
            "seed": 1,
            "run_id": "a",
            "budget_sec": 10.0,
            "trials": None,
            "until_ms": None,
        },
        {"event": "model", "time_sec": 0.0, "what": "te:GMM", "input_shapes": {}},
    ]
    text = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / "journal.jsonl").write_text(text)
    with pytest.raises(InvalidOptionError, match="give --store with the password again"):
        resume(tmp_path)


IN_A_FILE = """
[search]
n_trials_per_round = 4
[finish]
top_k = 1
max_task_sec = 0.5
"""


class DisplayOfAnInterruptedRun(Display):
    """Sends the process Ctrl-C after the second round."""

    n_rounds = 0

    def round(self, progress: RunProgress, budget: Budget) -> None:
        super().round(progress, budget)
        self.n_rounds += 1
        if self.n_rounds == 2:
            signal.raise_signal(signal.SIGINT)


def test_a_run_that_was_stopped_goes_on_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work_dir, config = tmp_path / "run", tmp_path / "quick.toml"
    config.write_text(IN_A_FILE)
    arguments = ["te:GMM", "--trials", "16", "--work-dir", str(work_dir)]
    with monkeypatch.context() as patch:
        patch.setattr("tvm_adaptive.cli.tune.Display", DisplayOfAnInterruptedRun)
        assert main(["tune", *arguments, "--config", str(config)]) == 130
    assert "--resume" in capsys.readouterr().out
    done = sum(len(event["latencies_ms"]) for event in of_kind(attempts(work_dir)[0], "measured"))
    assert 0 < done < 16
    assert main(["tune", "--resume", str(work_dir)]) == 0
    first, second = attempts(work_dir)
    counts = [len(event["latencies_ms"]) for event in of_kind(first + second, "measured")]
    assert sum(counts) == 16
    found = recorded_programs(work_dir)
    assert len(found) >= 16
    assert len(set(found)) == len(found)
    assert of_kind(second, "restored")[0]["n_samples"] >= done
    # Its times are compared with those of the first attempt, by the fastest of them.
    recorded = [event["latencies_ms"] for event in of_kind(first, "measured")]
    best_ms = min(ms for batch in recorded for ms in batch if ms is not None)
    (linked, *_) = of_kind(second, "duet")
    assert linked["anchor_sec"] == pytest.approx(best_ms / 1e3)
    assert linked["repeats_sec"]
