from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.budgets import __main__ as budgets
from benchmarks.starter import ablation
from tvm_adaptive.tuning.config_file import read_config


def test_the_table_compares_each_variant_with_both_in_pairs() -> None:
    secs = {name: [2e-3, 4e-3, 6e-3] for name in ablation.VARIANTS}
    secs["neither"] = [4e-3, 4e-3, 18e-3]
    text = ablation.table([{"model": "net", "secs": secs}])
    same = "1.00 (1.00 to 1.00)"
    assert f"| net | 4 ms | {same} | {same} | 2.00 (1.00 to 3.00) | {same} |" in text


def test_a_network_is_tuned_once_in_each_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def tune(_model: Any, _path: Path, work_dir: Path, _options: Any, *, extra: Any) -> None:
        *flags, name, file = extra
        assert name == "--config"
        search = read_config(Path(file)).search
        runs.append((tuple(flags), search.n_analytical > 0, search.seeds))
        work_dir.mkdir()
        (work_dir / "journal.jsonl").write_text(json.dumps({"event": "end"}) + "\n")
        (work_dir / "net.so").touch()

    monkeypatch.setattr(budgets, "tune", tune)
    monkeypatch.setattr(
        ablation, "time_in_turns", lambda libraries, *_rest: {each: [1e-3] for each in libraries}
    )
    monkeypatch.setattr(
        ablation, "MODELS", [type("M", (), {"name": "net", "shapes": {}, "file": _file})()]
    )
    for _ in range(2):
        ablation.main([str(tmp_path), "--models", "net"])
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
