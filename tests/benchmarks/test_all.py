"""The order of commands that ``benchmarks/all.sh`` gives, without one of them being run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "all.sh"
# Writes down its arguments, and the file that --out names.
STUB = """\
#!/bin/bash
echo "$@" >>"$COMMANDS"
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

    def run_script(*arguments: str) -> list[str]:
        commands.write_text("")
        env = {**os.environ, "PYTHON": str(stub), "COMMANDS": str(commands)}
        command = ["bash", str(SCRIPT), str(tmp_path / "figures"), *arguments]
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=60)
        return commands.read_text().splitlines()

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
