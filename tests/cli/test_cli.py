import argparse
import dataclasses
import errno
import io
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from tvm_adaptive.cli import main
from tvm_adaptive.cli.arguments import parse_duration
from tvm_adaptive.cli.display import Display, describe
from tvm_adaptive.cli.summary import print_report, summary_lines
from tvm_adaptive.cli.tune import exit_code
from tvm_adaptive.database import maintenance
from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.tuning import inspect
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.inspect import Best, ShownTask
from tvm_adaptive.tuning.outcome import Comparison, PeerTiming, TaskOutcome, TuneReport


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["resnet19"], "workload must be one of .*resnet18.*te:C2D.* but got 'resnet19'"),
        (["te:XYZ"], "but got 'te:XYZ'"),
        (
            ["te:GMM", "--cost-model", "best"],
            "cost model .best.; possible are rfei, rfei-family, xgb",
        ),
        (["te:GMM", "--strategy", "best"], "Unknown strategy 'best'; possible are adaptive"),
        (["te:GMM", "--runner", "best"], "Unknown runner 'best'; possible are adaptive"),
        (["te:GMM", "--builder", "best"], "Unknown builder 'best'; possible are persistent"),
        (["te:GMM", "--task-scheduler", "best"], "Unknown task scheduler 'best'; .*gradient"),
        (["te:GMM", "--preset", "fast"], "Unknown preset 'fast'; possible are default, paper"),
        (["te:GMM", "--target", "riscv-toaster"], "target"),
        (["te:GMM", "--target", '{"kind": "llvm"}'], "num-cores"),
        (["te:GMM", "--target", "{"], "target"),
        (["resnet18", "--layout", "NCHWc9"], "layout must be one of"),
        (["te:GMM", "--budget", "soon"], "'soon' is no duration"),
        (["te:GMM", "--trials", "0"], "'0' is no positive number"),
        (["te:GMM", "--speed", "9"], "unrecognized arguments: --speed"),
    ],
)
def test_bad_input_gets_one_line_and_nothing_written(
    arguments, text, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    # Arguments that argparse refuses end the process; what only we can refuse is returned.
    try:
        code = main(["tune", *arguments, "--work-dir", str(tmp_path / "run")])
    except SystemExit as end:
        code = end.code
    assert code == 2
    (last,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(text, last), last
    assert list(tmp_path.iterdir()) == []


def test_bad_input_to_a_process_gets_one_line(tmp_path):
    work_dir = tmp_path / "run"
    result = subprocess.run(
        [sys.executable, "-m", "tvm_adaptive", "tune", "te:XYZ", "--work-dir", str(work_dir)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 2
    (last,) = result.stderr.strip().splitlines()
    assert "but got 'te:XYZ'" in last
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.EIO, "Input/output error"), "error: Input/output error"),
        (PermissionError(errno.EACCES, "Permission denied", "runs/hers"), "runs/hers: Permission"),
    ],
)
def test_a_file_that_cannot_be_read_gets_one_line(error, text, monkeypatch, capsys):
    monkeypatch.setattr(inspect, "shown_tasks", Mock(side_effect=error))
    monkeypatch.setattr(maintenance, "stats", Mock(side_effect=error))
    for command in (["show", "runs/hers"], ["db", "stats"]):
        assert main(command) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert text in line


def test_a_work_dir_that_is_a_file_is_refused(tmp_path, capsys):
    path = tmp_path / "file"
    path.write_text("")
    assert main(["tune", "te:GMM", "--trials", "1", "--work-dir", str(path)]) == 2
    assert "cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("42", 42), ("0.5", 0.5)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "0", "-1s", "inf", "nan", "1d"])
def test_what_is_no_duration(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no duration"):
        parse_duration(text)


def make_report(**changes):
    fields = {
        "what": "net",
        "target": "llvm",
        "work_dir": Path("w"),
        "database_dir": Path("w/final"),
        "library": None,
        "tasks": (
            TaskOutcome("conv", 2.0, 32, 1, 0.002, played_off=True, n_disqualified=1),
            TaskOutcome("odd", 1.0, 16, 16, math.inf),
        ),
        "comparison": Comparison(0.5, 0.01, 1e-6, 1e-5, True),
        "coverage": "1 of 2 functions tuned (2 of 3 calls)",
        "weighted_sec": math.inf,
        "errors": {"timeout": 3, "crash": 14},
        "stage_secs": {"search": 50.0},
        "elapsed_sec": 60.0,
        "interrupted": False,
    }
    return TuneReport(**{**fields, **changes})


def test_the_report_says_what_was_asked_for():
    text = "\n".join(summary_lines(make_report()))
    assert "500.000 ms untuned, 10.000 ms tuned, 50.0 x faster" in text
    assert "agree; largest difference 1e-06 absolute" in text
    assert "48, 17 failed" in text
    assert text.index("14 x crash") < text.index("3 x timeout")
    assert "w/final" in text
    out = io.StringIO()
    print_report(make_report(), Console(file=out, width=120))
    assert "play-off, 1 out" in out.getvalue()
    json.dumps(make_report().as_fields())


def test_the_first_line_says_whether_it_beats_what_the_user_has():
    ours = (0.018, 0.0175, 0.0178)
    peers = (
        PeerTiming("ort", "ONNX Runtime 1.32.0", 2, (0.020, 0.0196, 0.0199), ours, 1, 1, True),
        PeerTiming("openvino", "OpenVINO 2026.4", 2, (0.013, 0.0125, 0.0130), ours, 1, 1, False),
        PeerTiming("torch", "PyTorch 2.14", 1, (0.0178,), (0.0178,), 0, 0, True),
    )
    comparison = Comparison(0.0199, 0.0178, 1e-6, 1e-5, True, peers[0].framework, peers)
    lines = summary_lines(make_report(comparison=comparison))
    assert lines[:4] == [
        (
            "1.12 x faster than ONNX Runtime 1.32.0 (2 threads): 17.8 ms, was 19.9 ms; "
            "1.11 to 1.12 x in 3 rounds"
        ),
        (
            "1.38 x slower than OpenVINO 2026.4 (2 threads): 17.8 ms, was 13.0 ms; "
            "1.37 to 1.40 x in 3 rounds; its outputs differ"
        ),
        "as fast as PyTorch 2.14 (1 thread): 17.8 ms, was 17.8 ms; 1.00 to 1.00 x in 1 round",
        "net on llvm",
    ]
    assert lines[4].startswith("outputs       agree with ONNX Runtime 1.32.0; largest difference")
    assert not any("untuned," in line for line in lines)


def test_the_report_says_that_the_framework_was_not_timed():
    comparison = Comparison(math.inf, 0.01, 1e-6, 1e-5, True, "PyTorch 2.14")
    text = "\n".join(summary_lines(make_report(comparison=comparison)))
    assert "latency       10.000 ms tuned\noutputs       agree with PyTorch 2.14;" in text


def test_a_task_may_be_called_what_is_markup_elsewhere(monkeypatch, capsys):
    name = "conv[/x][red]:smile:"
    task = TaskOutcome(name, 1.0, 4, 0, 0.001, played_off=True)
    out = io.StringIO()
    print_report(make_report(tasks=(task,)), Console(file=out, width=120))
    assert name in out.getvalue()
    shown = ShownTask(name, "[/y]", 1.0, Best(0.001))
    monkeypatch.setattr("tvm_adaptive.tuning.inspect.shown_tasks", lambda work_dir: [shown])
    monkeypatch.setattr("tvm_adaptive.tuning.inspect.shown_comparison", lambda work_dir: None)
    assert main(["show", "run"]) == 0
    assert name in (printed := capsys.readouterr().out)
    assert "[/y]" in printed


def test_a_name_that_is_too_long_for_a_line_is_whole_on_several():
    name = "fused_" + "conv2d_" * 20
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    task = TaskOutcome(name, 1.0, 4, 0, 0.001)
    print_report(make_report(tasks=(task,)), Console(file=out, width=80))
    out.seek(0)
    table = out.read().split("net on llvm")[0]
    assert name in "".join(line[:40].split(" ")[0] for line in table.splitlines()[1:])


def test_the_report_says_how_to_go_on_with_tasks_that_were_not_reached():
    # "odd" was tried, and failed; more time does not help it.
    assert "not reached" not in "\n".join(summary_lines(make_report()))
    tasks = (*make_report().tasks, TaskOutcome("late", 1.0, 0, 0, math.inf))
    (line,) = [each for each in summary_lines(make_report(tasks=tasks)) if "not reached" in each]
    assert "1 of 3 tasks" in line
    assert "--resume w " in line


def test_the_report_says_what_the_budget_was_too_short_for():
    lines = summary_lines(make_report(comparison=None, shortfall="no time was left to run net.so"))
    assert "not compared: no time was left to run net.so" in lines
    lines = summary_lines(make_report(shortfall="nothing is tuned"))
    assert "left out      nothing is tuned" in lines
    broken = {"comparison": None, "is_compiled": False, "failure": "ld: no room"}
    lines = summary_lines(make_report(**broken, shortfall="untuned, it takes more than 10 s"))
    assert "the tuned library could not be made: ld: no room" in lines


def test_the_report_tells_only_what_is_in_the_library():
    drafted = TaskOutcome(
        "small", 1.0, 0, 0, 1e-4, in_network=True, is_drafted=True, group="g", form="winograd"
    )
    of_earlier_run = TaskOutcome("large", 1.0, 0, 0, 1e-4, in_network=True)
    report = make_report(tasks=(*make_report().tasks, drafted, of_earlier_run))
    text = "\n".join(summary_lines(report))
    assert "drafted       1 of 4 tasks" in text
    assert "forms         winograd 1" in text
    report = dataclasses.replace(report, is_compiled=False, failure="the linker found no room")
    text = "\n".join(summary_lines(report))
    assert "drafted" not in text
    assert "forms" not in text
    assert "left out      the tuned library could not be made: the linker found no room" in text


def test_the_last_line_says_why_a_search_ended_early():
    text = "stopped after 212 of 600 s: nothing left"
    assert summary_lines(make_report(stopped=text))[-1] == text
    assert not any("stopped" in line for line in summary_lines(make_report()))


def test_a_program_counts_from_its_start(monkeypatch):
    reported = {}

    def tune(*_args, **options):
        reported.update(options)
        return make_report()

    monkeypatch.setattr("tvm_adaptive.cli.tune.tune", tune)
    arguments = ["tune", "te:GMM", "--budget", "10s", "--quiet"]
    assert main(arguments) == 0
    assert reported["spent_sec"] == 0.0
    monkeypatch.setattr(sys, "argv", ["tvm-adaptive", *arguments])
    assert main() == 0
    assert reported["spent_sec"] > 0.0
    # A shell that worked for an hour before its "exec" has the same start as the program.
    monkeypatch.setattr("psutil.Process.create_time", lambda _: time.time() - 3600.0)
    assert main() == 0
    assert 0.0 < reported["spent_sec"] <= time.process_time()


OPTIONS = (
    "--until-latency 5ms --use-all --allow-other-machine --trials 7 --store mine.db --seed 3 "
    "--lanes 2 --ray local --devices 0,1 --no-forms --prepack --vector-math --layout keep "
    "--no-starter --peers onnxruntime --until-plateau 9 --runner rpc --quiet"
)


def test_the_options_reach_a_run(monkeypatch):
    given = {}
    monkeypatch.setattr(
        "tvm_adaptive.cli.tune.tune", lambda *_, **options: given.update(options) or make_report()
    )
    arguments = f"tune te:GMM --work-dir w {OPTIONS} --input-shape x=1,2 --budget 10s".split()
    assert main(arguments) == 0
    config = given.pop("config")
    assert given.pop("observer")
    assert given == {
        "work_dir": Path("w"),
        "target": None,
        "budget_sec": 10.0,
        "trials": 7,
        "until_ms": 5.0,
        "seed": 3,
        "input_shapes": {"x": (1, 2)},
        "inputs": None,
        "allow_other_machine": True,
        "spent_sec": 0.0,
    }
    assert (config.use_all, config.store, config.starter) == (True, "mine.db", False)
    assert (config.forms, config.prepack, config.vector_math) == (False, True, True)
    assert (config.layout, config.peers, config.runner) == ("keep", "onnxruntime", "rpc")
    assert (config.search.lanes, config.search.ray) == (2, "local")
    assert (config.measure.devices, config.scheduler.plateau_slots) == ("0,1", 9)


def test_the_options_reach_a_resumed_run(monkeypatch):
    given = {}
    monkeypatch.setattr(
        "tvm_adaptive.cli.tune.resume", lambda *_, **options: given.update(options) or make_report()
    )
    arguments = "tune --resume w --until-latency 5ms --use-all --allow-other-machine"
    assert main(f"{arguments} --trials 7 --store mine.db --budget 10s --quiet".split()) == 0
    assert given.pop("observer")
    assert given == {
        "budget_sec": 10.0,
        "trials": 7,
        "until_ms": 5.0,
        "use_all": True,
        "store": "mine.db",
        "allow_other_machine": True,
        "spent_sec": 0.0,
    }


def test_a_report_is_opened_if_one_asks_for_it(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    page = tmp_path / "page.html"
    for option in ([], ["--open"]):
        assert main(["report", "--demo", "--out", str(page), *option]) == 0
    assert opened == [page.as_uri()]


FAILED = TaskOutcome("odd", 1.0, 16, 16, math.inf)
NOTHING_TUNED = {"shortfall": "nothing is tuned; the library is the untuned one"}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"comparison": Comparison(0.5, 0.01, 1.0, 1.0, False)}, 1),
        ({"comparison": None}, 1),
        ({"is_compiled": False, "failure": "the linker found no room"}, 1),
        ({"comparison": None, "shortfall": "no time was left to run net.so"}, 0),
        ({"comparison": None, "shortfall": "untuned, it is slow", "failure": "ld: no room"}, 1),
        ({"interrupted": True, "comparison": None}, 130),
        ({"tasks": (FAILED,), "comparison": None, **NOTHING_TUNED}, 1),
        ({"tasks": (FAILED,), **NOTHING_TUNED}, 1),  # beside its framework
        ({"tasks": (TaskOutcome("late", 1.0, 0, 0, math.inf),), **NOTHING_TUNED}, 0),
        ({"tasks": (FAILED, TaskOutcome("known", 1.0, 0, 0, 1e-3, played_off=True))}, 0),
        ({"tasks": (FAILED, TaskOutcome("drafted", 1.0, 0, 0, 1e-3, in_network=True))}, 0),
        ({"tasks": (FAILED,), "interrupted": True, "comparison": None}, 130),
    ],
)
def test_exit_codes(changes, code):
    assert exit_code(make_report(**changes)) == code


def test_the_display_is_plain_off_a_terminal_and_silent_when_quiet():
    progress = RunProgress([TaskProgress("a", 1.0, 4, 1, 0.001), TaskProgress("b", 1.0)])
    assert describe(progress) == "4 trials, 1 errors, 1 of 2 tasks timed, now "
    progress.tasks[1].best_sec = 0.002
    assert "sum of tasks 3.000 ms" in describe(progress)
    for quiet in (False, True):
        out = io.StringIO()
        with Display(Console(file=out), quiet=quiet) as display:
            display.stage("search")
            display.round(progress, Budget(10.0))
            display.note("a note")
        assert ("search ..." in out.getvalue()) is not quiet
        assert ("a note" in out.getvalue()) is not quiet


def test_the_display_draws_a_bar_on_a_terminal():
    out = io.StringIO()
    progress = RunProgress([TaskProgress("a", 1.0, 4, 1, 0.001)])
    console = Console(file=out, force_terminal=True, force_interactive=True, width=100)
    with Display(console) as display:
        display.stage("search")
        display.round(progress, Budget(10.0))
        display.note("a note")
    assert "a note" in out.getvalue()
    # Drawn, with what a plain display never writes.
    assert "search" in out.getvalue()
    assert "search ..." not in out.getvalue()
    assert "\x1b[" in out.getvalue()


def test_the_version_is_reported(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("tvm-adaptive ")
