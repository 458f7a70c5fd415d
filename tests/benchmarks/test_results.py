from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.compare import main
from benchmarks.entries import entries_of
from benchmarks.journals import Bench, load_bench
from benchmarks.plan import RunSpec
from benchmarks.remeasure import Timer, interleave
from benchmarks.results import comparisons, losses, overall
from benchmarks.tables import comparison_table, loss_list, machine_lines, markdown, vendor_table

Spec = Callable[..., RunSpec]
Write = Callable[..., Path]


@pytest.fixture
def bench(spec: Spec, write_run: Write, write_bench: Write) -> Bench:
    """Ours is four times as fast to a worse end."""
    write_run(spec("stock"), [(20.0, 8.0, 32), (40.0, 4.0, 64), (80.0, 2.0, 96)], 90.0)
    write_run(spec("default"), [(5.0, 8.0, 32), (10.0, 4.0, 64), (20.0, 2.5, 96)], 50.0)
    timed = {"stock/0/final": [2.0], "stock/0/64": [4.0], "default/0/final": [2.5]}
    return load_bench(write_bench(timed))


def test_what_is_timed_anew_are_winners_and_the_longer_run_cut_short(
    tmp_path: Path, bench: Bench
) -> None:
    found = {entry.name: entry for entry in entries_of(tmp_path, bench.runs)}
    assert set(found) == {"stock/0/final", "default/0/final", "stock/0/64"}
    assert found["stock/0/64"].n_trials == 64
    assert found["stock/0/final"].folder == str(tmp_path / "te-C2D" / "stock" / "0")


def test_a_method_is_compared_at_equal_quality_time_and_trials(bench: Bench) -> None:
    (found,) = comparisons(bench)
    assert (found.workload, found.method, found.n_pairs) == ("te:C2D", "default", 1)
    half, whole = found.speedup[0.5], found.speedup[1.0]
    assert half is not None
    assert whole is not None
    # Half of 8 to 2 ms is 5 ms: the baseline is there after 40 s, ours after 10 s.
    assert half.median.value == pytest.approx(4.0)
    # Never as good as the baseline's end: at best 80 s against our 21 s.
    assert whole.median.censored
    assert whole.median.value == pytest.approx(80 / 21)
    assert found.equal_time is not None
    assert found.equal_time.median.value == pytest.approx(4.0 / 2.5)
    assert found.equal_trials is not None
    assert found.equal_trials.median.value == pytest.approx(2.0 / 2.5)


def test_over_workloads_the_worst_is_named(bench: Bench) -> None:
    found = comparisons(bench)
    assert overall(found, "default")["equal trials"] == pytest.approx((0.8, 0.8, "te:C2D"))
    assert overall(found, "paper") == {}


def test_losses_are_listed(bench: Bench) -> None:
    assert losses(comparisons(bench)) == [("default", "te:C2D", "equal trials", 0.8)]
    assert loss_list(bench, "stock") == "- default on te:C2D, latency, equal trials: 0.80"


def test_a_method_that_goes_on_is_also_compared_at_the_baselines_trials(
    tmp_path: Path, spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("stock"), [(20.0, 8.0, 32), (80.0, 2.0, 96)], 90.0)
    write_run(spec("long"), [(20.0, 2.5, 96), (60.0, 1.0, 384)], 85.0)
    timed = {"stock/0/final": [2.0], "stock/0/96": [2.2], "long/0/final": [1.1]}
    bench = load_bench(write_bench({**timed, "long/0/96": [2.5]}))
    assert {entry.name for entry in entries_of(tmp_path, bench.runs)} == {*timed, "long/0/96"}
    (found,) = comparisons(bench)
    assert found.equal_time is not None
    assert found.equal_time.median.value == pytest.approx(2.2 / 1.1)
    assert found.equal_trials is not None
    assert found.equal_trials.median.value == pytest.approx(2.0 / 2.5)


def test_fewer_trials_than_the_baselines_are_not_compared_as_equal(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("stock"), [(80.0, 2.0, 96)], 90.0)
    write_run(spec("default"), [(20.0, 1.0, 64)], 30.0)
    (found,) = comparisons(
        load_bench(write_bench({"stock/0/final": [2.0], "default/0/final": [1.0]}))
    )
    assert found.equal_trials is None


def test_a_baseline_without_a_result_in_time_is_a_bound(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("stock"), [(80.0, 2.0, 64)], 90.0)
    write_run(spec("default"), [(5.0, 1.0, 64)], 10.0)
    (found,) = comparisons(
        load_bench(write_bench({"stock/0/final": [2.0], "default/0/final": [1.0]}))
    )
    assert found.equal_time is not None
    assert found.equal_time.median.censored
    assert found.equal_time.median.value == 2.0


def test_better_than_a_baseline_that_found_nothing_is_no_merit(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("stock"), [(80.0, None, 64)], 90.0)
    write_run(spec("default"), [(5.0, 1.0, 64)], 10.0)
    bench = load_bench(write_bench({"stock/0/final": [50.0], "default/0/final": [1.0]}))
    (found,) = comparisons(bench)
    assert (found.n_pairs, found.equal_time, found.equal_trials) == (0, None, None)
    assert loss_list(bench, "stock") == "- te:C2D, stock/0: found nothing; 1 of 64 trials failed"


def test_without_the_neutral_measurement_no_latencies_are_compared(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("stock"), [(80.0, 2.0, 64)], 90.0)
    write_run(spec("default"), [(5.0, 1.0, 64)], 10.0)
    (found,) = comparisons(load_bench(write_bench()))
    assert (found.equal_time, found.equal_trials) == (None, None)
    assert found.speedup[1.0] is not None


def test_the_table_says_what_is_a_bound(bench: Bench) -> None:
    table = comparison_table(bench, "stock")
    assert "| te:C2D | default | 1 | 4.00 |" in table
    assert "< 3.81, 1 of 1 never" in table
    assert "| **worst** | default |" in table


def test_a_network_stands_beside_the_vendors_library(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("default", workload="resnet18"), [(5.0, 1.0, 64)], 10.0)
    timed = {"default/0/final": [20.0], "untuned": [400.0], "pytorch": [30.0, 31.0, 29.0]}
    table = vendor_table(load_bench(write_bench(timed, "resnet18")))
    assert "| resnet18 | default | 20 | 20 to 20 | 1.50 |" in table
    assert "| resnet18 | untuned | 400.0 |" in table


def test_a_noisy_machine_is_said_to_be_one(bench: Bench) -> None:
    assert "too noisy" not in machine_lines(bench)
    bench.noise["before"].update(noisy=True, spread=0.3)
    assert "too noisy" in machine_lines(bench)


def test_markdown_has_a_rule_below_its_head() -> None:
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"


def test_a_report_is_written(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "report" / "tables.md").read_text()
    assert text == capsys.readouterr().out.rstrip("\n") + "\n"
    for heading in ("Best latency against seconds", "Losses", "Where the time goes", "Machine"):
        assert f"## {heading}" in text
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count("<svg") == 2
    # Self-contained: nothing is fetched.
    assert "src=" not in page
    assert "href=" not in page


def test_a_folder_that_is_no_benchmark_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "benchmarks.run" in capsys.readouterr().err


def test_timers_take_turns_and_a_crash_costs_one() -> None:
    asked: list[str] = []

    def timer(name: str, value: float) -> float:
        asked.append(name)
        if name == "bad":
            raise RuntimeError("first\nit crashed")
        return value

    timers = {name: (lambda name=name: timer(name, 1.0)) for name in ("a", "bad", "b")}
    timers["nonsense"] = lambda: float("nan")
    errors: dict[str, str] = {}
    samples = interleave(timers, 3, errors)
    assert asked == ["a", "bad", "b", "b", "a", "a", "b"]
    assert samples == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert errors == {"bad": "it crashed", "nonsense": "measured nan ms, which is no time"}


def test_a_timer_that_takes_long_is_asked_in_the_first_rounds_only() -> None:
    timers: dict[str, Timer] = {"winner": lambda: 1.0, "untuned": lambda: 9.0}
    samples = interleave(timers, 5, {}, limits={"untuned": 2})
    assert samples == {"winner": [1.0] * 5, "untuned": [9.0] * 2}
