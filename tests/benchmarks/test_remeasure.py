from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks import regret, remeasure
from benchmarks.entries import Entry
from benchmarks.journals import read_events, read_rounds
from benchmarks.plan import RunSpec
from benchmarks.regret import regret_of
from benchmarks.remeasure import Effort, Timer

ROOT = Path(__file__).parents[2]
Spec = Callable[..., RunSpec]
Write = Callable[..., Path]
TIMERS = tuple[dict[str, Timer], dict[str, str]]


class Bench:
    """Kernels whose times are known; a process of theirs can be killed."""

    def __init__(self) -> None:
        self.true_ms: dict[str, float] = {}
        self.n_processes = 0
        self.n_left = 10**6
        self._hour = itertools.count(1)

    @contextlib.contextmanager
    def timers_of(
        self, folder: Path, spec: RunSpec, entries: Sequence[Entry], repeat_ms: float
    ) -> Iterator[TIMERS]:
        self.n_processes += 1
        yield {entry.name: (lambda name=entry.name: self._time(name)) for entry in entries}, {}

    def _time(self, name: str) -> float:
        self.n_left -= 1
        if self.n_left < 0:
            raise KeyboardInterrupt
        # Each timing is a little slower than the one before: drift.
        return self.true_ms.get(name, 1.0) * (1.0 + 1e-4 * next(self._hour))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Bench:
    found = Bench()
    monkeypatch.setattr(remeasure, "timers_of", found.timers_of)
    return found


def test_a_killed_measurement_goes_on_with_the_next_round(
    tmp_path: Path, spec: Spec, kernels: Bench
) -> None:
    path = tmp_path / "neutral.jsonl"
    entries = [Entry("a"), Entry("b")]
    effort = Effort(rounds=6, n_processes=3)
    kernels.n_left = 7
    with pytest.raises(KeyboardInterrupt):
        remeasure.remeasure(path, spec(), entries, effort)
    first = read_rounds(path)[0]
    assert [len(each) for each in first.values()] == [3, 3]
    kernels.n_left = 10**6
    assert remeasure.remeasure(path, spec(), entries, effort) == 3
    whole = read_rounds(path)[0]
    assert [len(each) for each in whole.values()] == [6, 6]
    assert {name: each[0] for name, each in whole.items()} == {
        name: each[0] for name, each in first.items()
    }
    # Two before the end, then the rest of the second and the third.
    assert kernels.n_processes == 4
    assert remeasure.remeasure(path, spec(), entries, effort) == 0
    assert kernels.n_processes == 4


def test_when_there_is_more_to_time_all_of_it_is_timed_together(
    tmp_path: Path, spec: Spec, kernels: Bench
) -> None:
    path = tmp_path / "neutral.jsonl"
    remeasure.remeasure(path, spec(), [Entry("a")], Effort(rounds=2, n_processes=1))
    entries = [Entry("a"), Entry("b")]
    assert remeasure.remeasure(path, spec(), entries, Effort(rounds=3, n_processes=1)) == 3
    assert [len(each) for each in read_rounds(path)[0].values()] == [3, 3]
    (plan,) = [event for event in read_events(path) if event["event"] == "plan"]
    assert plan["entries"] == ["a", "b"]
    assert plan["machine"]["n_processors"] >= 1


def test_the_quick_form_times_all_that_was_ever_the_best(
    spec: Spec, write_run: Write, write_bench: Write, kernels: Bench
) -> None:
    write_run(spec("stock"), [(20.0, 8.0, 32), (80.0, 2.0, 96)], 90.0)
    write_run(spec("default"), [(5.0, 8.0, 32), (20.0, 2.5, 96)], 50.0)
    out = write_bench()
    assert remeasure.main([str(out), "--quick"]) == 0
    timed, _ = read_rounds(out / "te-C2D" / "neutral.jsonl")
    assert {"stock/0/32", "stock/0/final", "stock/0/final-3", "default/0/96"} <= set(timed)
    assert {len(each) for each in timed.values()} == {2}


def test_short_timings_do_not_count_as_long_ones(
    tmp_path: Path, spec: Spec, kernels: Bench
) -> None:
    path = tmp_path / "neutral.jsonl"
    remeasure.remeasure(path, spec(), [Entry("a")], remeasure.QUICK)
    assert remeasure.remeasure(path, spec(), [Entry("a")], Effort(rounds=4)) == 4
    assert len(read_rounds(path)[0]["a"]) == 4


def test_the_page_has_the_regret_that_the_command_prints() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    (line,) = (each for each in page.splitlines() if each.startswith("| regret: what is deployed"))
    published = [cell.strip() for cell in line.strip("|").split("|")[1:]]
    (head,) = (each for each in page.splitlines() if each.startswith("| | GMM | CBR |"))
    names = [cell.strip() for cell in head.strip("|").split("|")[1:]]
    for name, cell in zip(names, published, strict=True):
        folder = ROOT / "benchmarks" / "results" / "operators-anew" / f"te-{name.replace(':', '-')}"
        timed, _ = read_rounds(folder / "regret-long.jsonl")
        row = regret.row_of(f"te:{name}", "long/0", math.nan, timed, 0)
        interval = "" if row[4] in {"-", "1.000 to 1.000"} else f" ({row[4]})"
        assert cell == f"{row[3]}{interval}", name


def test_regret_is_of_what_was_deployed_and_luck_does_not_choose_the_best(
    spec: Spec,
    write_run: Write,
    write_bench: Write,
    kernels: Bench,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(spec("default"), [(5.0, 0.8, 32)], 50.0)
    out = write_bench()
    kernels.true_ms = {"default/0/final": 1.1, "default/0/top-2": 0.9}
    assert regret.main([str(out), "--top", "3", "--rounds", "8", "--processes", "2"]) == 0
    # 1.1 over 0.9; the recorded 0.8 ms were 1.0.
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| te:C2D | default/0 | 3 | 1.22")
    assert row.endswith("| 1.25 x | 0 |")
    assert regret.main([str(out), "--table"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == row
    # Thirty of the same kernel: whichever was the luckiest is no better than what was deployed.
    rng = np.random.default_rng(0)
    same = {
        f"default/0/{name}": dict(enumerate(np.exp(rng.normal(0.0, 0.1, 200)).tolist()))
        for name in ("final", *(f"top-{n}" for n in range(1, 31)))
    }
    found = regret_of("default/0", same)
    assert found is not None
    assert found.low <= 1.0 <= found.high
    # Every round judges, and packing runs together may shift their numbers.
    assert found.n == 200
    shifted = {
        name: {number + 1: ms for number, ms in rounds.items()} for name, rounds in same.items()
    }
    assert regret_of("default/0", shifted) == found
    assert regret_of("default/1", same) is None
    # One round cannot choose and judge.
    assert regret_of("default/0", {name: {0: 1.0} for name in same}) is None
