"""The policies that are replayed, and their table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import benchmarks
from benchmarks.scheduler.replay import STANDARD, summarise
from benchmarks.stats import Interval, exactly

FIVE, ONE = "to_5_sec", "to_1_sec"
PAGE = Path(benchmarks.__file__).with_name("README.md")


def row(network: str, policy: str, sec: Interval) -> dict[str, Any]:
    about = {"network": network, "policy": policy, "seed": 0, "area": 1.0, "decision_ms": 1.0}
    return {**about, FIVE: sec, ONE: sec}


def test_the_standard_policies_are_those_of_the_page() -> None:
    assert len(STANDARD) == 15
    assert {"default", "paper, quadrature", "ucb", "default, records", "oracle"} <= set(STANDARD)
    table = PAGE.read_text().split("| policy | to 5 %, x |")[1].split("\n\n")[0]
    names = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]
    assert {name for name in names if "(removed since)" not in name} == {*STANDARD, "paper"}


def test_a_network_where_a_policy_never_got_there_is_its_worst() -> None:
    never, fast = Interval(5.0, float("inf")), exactly(50.0)
    rows = [row(name, "gradient", exactly(100.0)) for name in ("a", "b")]
    rows += [row("a", "random", fast), row("b", "random", never)]
    worst = summarise(rows, "gradient")["overall"]["random"]["worst_to_5_speedup"]
    assert worst == Interval(0.0, 20.0)
