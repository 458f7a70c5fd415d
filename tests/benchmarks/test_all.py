"""The commands that ``benchmarks/all.sh`` gives, without one of them being run."""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "all.sh"
# Writes down its arguments, and the file that --out names.
STUB = """\
#!/bin/bash
printf '%q ' "$@" >>"$COMMANDS"
echo >>"$COMMANDS"
while [ $# -gt 1 ]; do
  [ "$1" = --out ] && { mkdir -p "$(dirname "$2")"; touch "$2"; }
  shift
done
"""

Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    stub, commands = tmp_path / "python", tmp_path / "commands"
    stub.write_text(STUB)
    stub.chmod(0o755)

    def run_script(
        *arguments: str, out: str = str(tmp_path / "figures"), python: str = str(stub)
    ) -> list[str]:
        commands.write_text("")
        env = {**os.environ, "PYTHON": python, "COMMANDS": str(commands)}
        command = ["bash", str(SCRIPT), out, *arguments]
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=60)
        return [line.rstrip() for line in commands.read_text().splitlines()]

    return run_script


def test_the_least_of_a_step_is_not_the_step(run: Run) -> None:
    run("--quick", "schedulers")
    recorded = [line for line in run("schedulers") if "benchmarks.scheduler.record" in line]
    assert len(recorded) == 6
    assert not run("schedulers")  # done before


def test_ours_runs_before_and_after_stock(run: Run) -> None:
    lines = [line for line in run("networks") if "--workloads transformer" in line]
    methods = [line.split("--methods ")[1].split()[0] for line in lines]
    assert methods == ["default", "stock", "default"]
    assert "--first-seed 1" in lines[-1]
    assert "--network-budget 3m" in lines[0]
    assert lines[1].endswith("--network-budget 27m")


def test_the_least_of_a_warm_start_is_made_for_quick_only(run: Run) -> None:
    assert sum("--budget 6m" in line for line in run("warm_starts")) == 2
    (least,) = run("--quick", "warm_starts")
    assert "--budget 25s" in least


@pytest.mark.parametrize("steps", [("figure",), ("schedulers", "--quick"), ("schedulers ranking",)])
def test_an_unknown_step_makes_nothing(steps: tuple[str, ...], tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), str(tmp_path / "figures"), *steps]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"no step '{steps[-1]}'; steps are operators first_trials ")
    assert not (tmp_path / "figures").exists()


def test_paths_are_relative_to_the_caller(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "elsewhere"
    lines = run("first_trial", out="elsewhere", python="./python")
    assert lines[-1].endswith(f"--out {out}/preparation.json")
    assert (out / "logs" / "first_trial.done").exists()


class ParsedError(Exception):
    """Takes the place of all that a script does after it has read its arguments."""


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("quick", [(), ("--quick",)])
def test_every_script_understands_its_arguments(
    quick: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnx")
    lines = [shlex.split(line) for line in run(*quick)]
    commands = [words[1:] for words in lines if words[0] == "-m"]
    assert len({module for module, *_ in commands}) > 25
    parse_args = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *given: list[str] | None) -> NoReturn:
        parse_args(parser, *given)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    for module, *arguments in commands:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(ParsedError):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
