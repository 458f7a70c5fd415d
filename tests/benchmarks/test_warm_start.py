from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.micro.agreement import table as agreement_table
from benchmarks.micro.warm_start import plan, row, table, time_pair, time_to, tune_once
from tests.benchmarks.conftest import write_journal
from tvm_adaptive.models import BUILTIN
from tvm_adaptive.tuning.config import TuneConfig

PAIRS = [("cold", "warm")]
CURVE = [(5.0, 30.0), (10.0, 20.0), (40.0, 16.0)]


def write(folder: Path, curve: list[tuple[float, float]]) -> None:
    events = [{"event": "journal", "time_sec": 0.0, "version": 1}]
    unknown = {"event": "measured", "time_sec": 1.0, "weighted_ms": None}
    known = [{"event": "measured", "time_sec": sec, "weighted_ms": ms} for sec, ms in curve]
    write_journal(folder / "journal.jsonl", [*events, unknown, *known])


@pytest.mark.parametrize(
    ("quality_ms", "seconds"), [(30.0, 5.0), (19.0, 40.0), (16.0, 40.0), (15.9, math.inf)]
)
def test_time_to_a_quality(quality_ms: float, seconds: float) -> None:
    assert time_to(CURVE, quality_ms) == seconds


def test_a_warm_run_is_compared_with_what_the_cold_one_had_at_its_end(tmp_path: Path) -> None:
    write(tmp_path / "cold", CURVE)
    write(tmp_path / "warm", [(2.0, 16.2), (4.0, 15.0)])
    lines = table(tmp_path, ["cold", "warm"], PAIRS).splitlines()
    assert "| warm | 2.0 | 16.20 | 15.00 | 4 |" in lines
    assert "| warm | cold's end + 0% | 40 | 4 | 10.0 |" in lines
    assert "| warm | cold's end + 2% | 40 | 2 | 20.0 |" in lines


def test_a_quality_that_was_never_reached_has_no_ratio(tmp_path: Path) -> None:
    write(tmp_path / "cold", CURVE)
    write(tmp_path / "warm", [(2.0, 17.0)])
    assert "| warm | cold's end + 0% | 40 | inf | nan |" in table(tmp_path, ["cold", "warm"], PAIRS)


def test_every_warm_run_knows_what_the_first_one_left_and_no_more(tmp_path: Path) -> None:
    options = argparse.Namespace(
        network="resnet18",
        sibling=["resnet50", "width=32", "image_size=64"],
        no_again=False,
        budget=60.0,
        warm_budget=20.0,
        seed=3,
        out=tmp_path,
    )
    runs = {spec["name"]: spec for spec in plan(options)}
    sized = "resnet18-width32-image_size64"
    assert list(runs) == [
        *("cold", "warm", "resnet50-cold", "resnet50-warm"),
        *(f"{sized}-cold", f"{sized}-warm"),
    ]
    warm = [spec for name, spec in runs.items() if name.endswith("warm")]
    assert {spec["knows"] for spec in warm} == {runs["cold"]["store"]}
    assert len({spec["store"] for spec in warm}) == len(warm)
    assert runs["cold"]["store"] not in {spec["store"] for spec in warm}
    assert {spec["budget_sec"] for spec in warm} == {20.0}
    # They are made anew if what they know is.
    options.budget = 90.0
    again = {spec["name"]: spec for spec in plan(options)}
    assert not [name for name, spec in runs.items() if spec == again[name]]
    assert runs[f"{sized}-cold"]["store"] == "none"
    assert runs[f"{sized}-cold"]["sizes"] == {"width": 32, "image_size": 64}
    options.no_again, options.warm_budget = True, None
    assert [spec["name"] for spec in plan(options)][:2] == ["cold", "resnet50-cold"]


@pytest.mark.parametrize("store", ["none", "records.db"])
def test_runs_with_and_without_memory_begin_without_starter_records(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[TuneConfig] = []

    def tune(*_network: Any, config: TuneConfig, **_: Any) -> None:
        configs.append(config)

    monkeypatch.setattr("benchmarks.micro.warm_start.tune_relax", tune)
    monkeypatch.setitem(BUILTIN, "n", lambda: SimpleNamespace(mod=None, params={}))
    run = {"network": "n", "sizes": {}, "store": store, "out": "", "budget_sec": 60.0, "seed": 0}
    tune_once(run)
    assert [(each.store, each.starter) for each in configs] == [(store, False)]


def test_networks_of_a_pair_are_compared_round_by_round(tmp_path: Path) -> None:
    write(tmp_path / "cold", CURVE)
    write(tmp_path / "warm", CURVE[:2])
    timed = {"cold": [10.0, 20.0, 40.0], "warm": [9.0, 18.0, 36.0]}
    expected = "| warm | 40 | 10 | 4.0 | 20.00 | 18.00 | 0.900 (0.90 to 0.90) |"
    assert row(tmp_path, "cold", "warm", timed) == expected


def test_a_pair_is_timed_again_when_its_runs_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fake(
        libraries: dict[str, tuple[Path, int]], inputs: Any, n_rounds: int
    ) -> dict[str, list[float]]:
        asked.append((inputs, {name: path for name, (path, _) in libraries.items()}))
        return {name: [1e-3] * n_rounds for name in libraries}

    monkeypatch.setattr("benchmarks.micro.warm_start.time_in_turns", fake)
    monkeypatch.setitem(BUILTIN, "n", lambda a: SimpleNamespace(random_inputs=lambda: [a]))
    cold, warm = ({"name": name, "network": "n", "sizes": {"a": 1}} for name in ("c", "w"))
    paths = {name: tmp_path / name / "network.so" for name in ("c", "w")}
    assert time_pair(tmp_path, cold, warm, 2) == {"c": [1.0, 1.0], "w": [1.0, 1.0]}
    assert time_pair(tmp_path, cold, warm, 2) == {"c": [1.0, 1.0], "w": [1.0, 1.0]}
    assert asked == [([1], paths)]
    assert json.loads((tmp_path / "w.rounds.json").read_text())["machine"]["commit"]
    time_pair(tmp_path, cold, {**warm, "seed": 7}, 2)
    assert len(asked) == 2


def test_agreement_is_a_ratio_and_a_rank() -> None:
    # The first of three rounds took twice as long, the second half as long.
    found = [{"recorded_sec": 1.1 * x, "alone_sec": [2 * x, x / 2, x]} for x in (1.0, 2.0, 3.0)]
    reported = agreement_table("run", found).splitlines()
    assert reported[2:] == [
        "| run | 3 | 1.100 | 1.100 to 1.100 | 1.00 |",
        "| one round alone | 3 | 2.000 | 2.000 to 2.000 | 1.00 |",
    ]
    assert agreement_table("run", []).count("\n") == 1
