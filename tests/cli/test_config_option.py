from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tvm_adaptive.cli import main
from tvm_adaptive.cli.arguments import parse_latency
from tvm_adaptive.tuning.config import DEFAULT, PAPER
from tvm_adaptive.tuning.config_file import parse_config

Captured = pytest.CaptureFixture[str]


def printed(arguments: list[str], capsys: Captured) -> str:
    assert main(["tune", "--print-config", *arguments]) == 0
    return capsys.readouterr().out


def test_what_would_be_used_is_printed_as_a_file(capsys: Captured) -> None:
    assert parse_config(printed([], capsys)) == DEFAULT
    assert parse_config(printed(["--preset", "paper"], capsys)) == PAPER
    given = ["te:GMM", "--cost-model", "xgb", "--no-prepack", "--no-vector-math", "--no-starter"]
    changed = parse_config(printed(given, capsys))
    assert changed == DEFAULT.replace(
        cost_model="xgb", prepack=False, vector_math=False, starter=False
    )


@pytest.mark.parametrize("given", [["--tracker", "host:9190"], ["--tracker-key", "board"]])
def test_what_names_a_farm_measures_on_it(given: list[str], capsys: Captured) -> None:
    assert parse_config(printed(given, capsys)).runner == "adaptive-rpc"
    assert parse_config(printed([*given, "--runner", "rpc"], capsys)).runner == "rpc"


def test_the_runner_of_a_file_keeps_measuring_on_the_farm(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "stock.toml"
    path.write_text('runner = "rpc"\n')
    given = ["--config", str(path), "--tracker", "host:9190"]
    assert parse_config(printed(given, capsys)).runner == "rpc"


def test_a_plateau_is_an_option_of_the_scheduler(capsys: Captured) -> None:
    assert (
        parse_config(printed(["te:GMM", "--until-plateau"], capsys)).scheduler.plateau_slots == 40
    )
    assert parse_config(printed(["--until-plateau", "7"], capsys)).scheduler.plateau_slots == 7


@pytest.mark.parametrize(("text", "ms"), [("5ms", 5.0), ("800us", 0.8), ("0.2s", 200.0)])
def test_latencies(text: str, ms: float) -> None:
    assert parse_latency(text) == pytest.approx(ms)


@pytest.mark.parametrize("text", ["5", "ms", "-1ms", "0us", "soon", "infs", "nanms"])
def test_what_is_no_latency(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no latency"):
        parse_latency(text)


def test_options_go_before_a_file(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('preset = "paper"\nrunner = "local"\nbuilder = "local"\n')
    config = parse_config(printed(["--config", str(path), "--runner", "adaptive"], capsys))
    assert config == PAPER.replace(builder="local")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--config", "nowhere.toml"], "nowhere.toml cannot be read"),
        (["--config", "mine.toml", "--preset", "paper"], "--preset or --config"),
        (["--resume", "somewhere", "--print-config"], "--print-config prints the options of a new"),
        ([], "Say what to tune"),
        (["te:GMM", "--task-scheduler", "gradient", "--until-plateau"], "scheduler of ours"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], text: str, capsys: Captured) -> None:
    assert main(["tune", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert text in shown.err
