from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import commands
from benchmarks.ablation import __main__ as ablation
from benchmarks.ablation.plain import PARTS
from tvm_adaptive.tuning.config_file import read_config


def test_the_table_compares_each_variant_with_the_first_in_pairs() -> None:
    variants = ablation.ABLATIONS["starter"]
    secs = {name: [2e-3, 4e-3, 6e-3] for name in variants}
    secs["neither"] = [4e-3, 4e-3, 18e-3]
    text = ablation.table(list(variants), [{"model": "net", "secs": secs}])
    same = "1.00 (1.00 to 1.00)"
    assert f"| net | 4 ms | {same} | {same} | 2.00 (1.00 to 3.00) | {same} |" in text


def test_a_network_is_tuned_once_in_each_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def tune(_model: Any, _path: Path, work_dir: Path, _options: Any, **given: Any) -> None:
        *flags, name, file, option, store = given["extra"]
        assert (name, option) == ("--config", "--store")
        assert not Path(store).exists()
        Path(store).touch()
        search = read_config(Path(file)).search
        assert given["program"] == commands.COMMAND_LINE
        runs.append((tuple(flags), search.n_analytical > 0, search.seeds))
        work_dir.mkdir()
        (work_dir / "journal.jsonl").write_text(json.dumps({"event": "end"}) + "\n")
        (work_dir / "net.so").touch()

    monkeypatch.setattr(commands, "tune", tune)
    monkeypatch.setattr(
        ablation, "secs_in_turns", lambda libraries, *_rest: {each: [1e-3] for each in libraries}
    )
    monkeypatch.setattr(
        ablation, "MODELS", [type("M", (), {"name": "net", "shapes": {}, "file": _file})()]
    )
    for _ in range(2):
        ablation.main([str(tmp_path), "--of", "starter", "--models", "net"])
    none = ("--no-starter",)
    assert runs == [
        ((), True, True),
        ((), False, True),
        (none, True, True),
        (none, False, True),
        ((), True, False),
    ]


def _file(_model: Any, folder: Path) -> Path:
    return folder / "net.onnx"


def test_parts_of_the_preparation_are_turned_off_one_after_the_other() -> None:
    first, *others = ablation.ABLATIONS["preparation"].values()
    assert first == ablation.Variant()
    for before, after in itertools.pairwise(others):
        assert set(before.flags) <= set(after.flags)
        assert set(before.without) <= set(after.without) <= set(PARTS)


def test_a_part_that_is_turned_off_changes_what_is_prepared() -> None:
    """In a process of its own: it stays turned off."""
    program = """
import sys
from benchmarks.ablation.plain import turn_off
from tvm_adaptive.models import BUILTIN, prepare
from tvm_adaptive.tuning.target import resolve_target

turn_off(sys.argv[1:])
network = BUILTIN["transformer"]()
print(prepare(network, resolve_target("cpu"), vector_math=True).mod.script())
"""
    said = [
        subprocess.run(
            [sys.executable, "-c", program, *parts], capture_output=True, text=True, check=True
        ).stdout
        for parts in ([], ["operators"])
    ]
    assert said[0] != said[1]
