from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.micro.agreement import table as agreement_table
from benchmarks.micro.warm_start import table, time_to
from tests.benchmarks.conftest import write_journal

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
    lines = table(tmp_path, ["cold", "warm"]).splitlines()
    assert "| warm | 2.0 | 16.20 | 15.00 | 4 |" in lines
    assert "| warm | cold's end + 0% | 40 | 4 | 10.0 |" in lines
    assert "| warm | cold's end + 2% | 40 | 2 | 20.0 |" in lines


def test_a_quality_that_was_never_reached_has_no_ratio(tmp_path: Path) -> None:
    write(tmp_path / "cold", CURVE)
    write(tmp_path / "warm", [(2.0, 17.0)])
    assert "| warm | cold's end + 0% | 40 | inf | nan |" in table(tmp_path, ["cold", "warm"])


def test_agreement_is_told_by_ratio_and_rank() -> None:
    found = [{"recorded_sec": 1.1 * x, "alone_sec": x} for x in (1.0, 2.0, 3.0)]
    assert "| run | 3 | 1.100 | 1.100 to 1.100 | 1.00 |" in agreement_table("run", found)
    assert agreement_table("run", []).count("\n") == 1
