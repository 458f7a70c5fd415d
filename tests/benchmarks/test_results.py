from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.compare import main
from benchmarks.entries import baseline_of, entries_of
from benchmarks.journals import Bench, load_bench
from benchmarks.plan import RunSpec
from benchmarks.remeasure import Timer, interleave
from benchmarks.results import comparisons, losses, overall
from benchmarks.stats import Interval, exactly, spread
from benchmarks.tables import comparison_table, loss_list, machine_lines, markdown, vendor_table

Spec = Callable[..., RunSpec]
Write = Callable[..., Path]


@pytest.fixture
def bench(spec: Spec, write_run: Write, write_bench: Write) -> Bench:
    """Ours has the baseline's quality, all timed anew, after 20 s and never by its record."""
    write_run(spec("stock"), [(20.0, 8.0, 32), (40.0, 4.0, 64), (80.0, 2.0, 96)], 90.0)
    write_run(spec("default"), [(5.0, 8.0, 32), (10.0, 4.0, 64), (20.0, 2.5, 96)], 50.0)
    timed = {"stock/0/32": 8.0, "stock/0/64": 4.0, "stock/0/final": 2.4, "stock/0/final-2": 2.2}
    timed |= {"default/0/32": 8.0, "default/0/64": 2.6, "default/0/96": 2.25}
    timed |= {"default/0/final": 2.0, "default/0/final-copy": 2.02}
    return load_bench(write_bench({name: [ms] * 7 for name, ms in timed.items()}))


def test_all_that_was_ever_the_best_is_timed_anew(tmp_path: Path, bench: Bench) -> None:
    found = {entry.name: entry for entry in entries_of(tmp_path, bench.runs)}
    stock = {"32", "64", "final", "final-copy", "final-2", "final-3", "64-2", "64-3"}
    ours = {"32", "64", "96", "final", "final-copy"}
    # Stock's record is its winner, which is timed as such; ours was chosen by a play-off.
    assert set(found) == {f"stock/0/{cut}" for cut in stock} | {f"default/0/{cut}" for cut in ours}
    assert (found["stock/0/64"].n_trials, found["stock/0/64"].rank) == (64, 1)
    assert (found["stock/0/64-3"].n_trials, found["stock/0/64-3"].rank) == (64, 3)
    assert (found["stock/0/final-2"].n_trials, found["stock/0/final-2"].rank) == (None, 2)
    assert found["stock/0/final"].folder == str(tmp_path / "te-C2D" / "stock" / "0")


def test_a_network_of_many_incumbents_is_thinned(
    tmp_path: Path, spec: Spec, write_run: Write, write_bench: Write
) -> None:
    points = [(float(n), 100.0 - n, 16 * n) for n in range(1, 40)]
    write_run(spec("default", workload="resnet18"), points, 50.0)
    names = [entry.name for entry in entries_of(tmp_path, load_bench(write_bench()).runs)]
    assert len(names) == 8
    assert {"default/0/16", "default/0/624", "default/0/final"} <= set(names)


def test_a_method_is_compared_at_equal_quality_time_and_trials(bench: Bench) -> None:
    (found,) = comparisons(bench)
    assert (found.workload, found.method, found.n_pairs) == ("te:C2D", "default", 1)
    medians = {name: each.median for name, each in found.figures.items() if each is not None}
    # q is 2.2 ms, the best of stock's top three, which it has when it ends, after 90 s. Ours has
    # 2.25 ms after 20 s; its recorded times were lucky, or not, and do not matter.
    assert medians["time to q"] == exactly(90.0 / 20.0)
    assert medians["trials to q"] == exactly(1.0)
    # When ours ended, after 50 s, stock had 4 ms.
    assert medians["equal time"] == exactly(4.0 / 2.0)
    assert medians["equal trials"] == exactly(2.2 / 2.0)
    assert found.timed == (6, 6)
    assert found.noise == pytest.approx(0.01)
    # As recorded ours was at 2.5 x 2.0 / 2.5 = 2 ms after 20 s, stock at 2.4 after 80 s.
    assert found.scaled == pytest.approx(80 / 20)


def test_the_start_of_a_process_counts_on_both_sides(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("stock"), [(80.0, 2.0, 96)], 90.0)
    write_run(spec("default"), [(10.0, 2.0, 96)], 50.0)
    timed = {"stock/0/final": [2.0] * 7, "default/0/96": [2.0] * 7, "default/0/final": [2.0] * 7}
    starts = {spec("stock"): 10.0, spec("default"): 5.0}
    bench = load_bench(write_bench(timed, start_up_sec=starts))
    (found,) = comparisons(bench)
    assert found.figures["time to q"] is not None
    assert found.figures["time to q"].median == exactly((80.0 + 10.0) / (10.0 + 5.0))
    (ours,) = bench.of("te:C2D", "default")
    assert (ours.finish_sec, ours.stages["start-up"]) == (55.0, 5.0)


def test_a_clock_that_was_set_back_is_no_start_up(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec(), [(10.0, 2.0, 96)], 50.0)
    bench = load_bench(write_bench(start_up_sec={spec(): -3600.0}))
    assert bench.runs[0].finish_sec == 50.0


def test_a_winner_that_crashes_when_timed_anew_is_a_loss(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "te-C2D" / "neutral.jsonl"
    failed = {"event": "round", "time_sec": 0.0, "ms": {}, "errors": {"default/0/final": "killed"}}
    path.write_text(json.dumps(failed) + "\n")
    neutral = tmp_path / "te-C2D" / "neutral.json"
    entries = json.loads(neutral.read_text())
    del entries["entries"]["default/0/final"]
    neutral.write_text(json.dumps(entries))
    bench = load_bench(tmp_path)
    (found,) = comparisons(bench)
    for name in ("equal time", "equal trials"):
        assert found.figures[name] == spread([Interval(0.0, 1.0)])
    lost = "- te:C2D, default/0: its winner could not be timed anew: killed"
    assert lost in loss_list(bench, "stock").splitlines()


def test_what_the_play_off_refuted_was_never_had(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("stock"), [(80.0, 2.0, 96)], 90.0)
    journal = write_run(spec("default"), [(5.0, 8.0, 32), (10.0, 1.0, 64)], 50.0) / "journal.jsonl"
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    finalist = {"recorded_ms": 1.0, "disqualified": "wrong result: 3 of 4 elements differ"}
    for event in events:
        if event["event"] == "playoff":
            event["candidates"] = [finalist]
    journal.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    timed = {"stock/0/final": 2.0, "default/0/32": 8.0, "default/0/64": 1.0, "default/0/final": 3.0}
    bench = load_bench(write_bench({name: [ms] * 7 for name, ms in timed.items()}))
    (ours,) = bench.of("te:C2D", "default")
    assert [each.recorded_ms for each in ours.incumbents] == [8.0]
    entries = [each for each in entries_of(Path("out"), bench.runs) if each.method == "default"]
    assert {each.refuted_ms for each in entries if each.n_trials is not None} == {(1.0,)}
    (found,) = comparisons(bench)
    assert found.figures["time to q"] is not None
    assert found.figures["time to q"].n_never == 1


@pytest.mark.parametrize("finish_sec", [85.0, 95.0])
def test_the_baseline_has_its_play_off_from_its_last_trial_on(
    finish_sec: float, spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("stock"), [(20.0, 8.0, 32), (80.0, 2.0, 96)], 90.0)
    write_run(spec("default"), [(20.0, 2.5, 96)], finish_sec)
    timed = {"stock/0/final": 2.4, "stock/0/final-2": 2.2, "default/0/final": 2.0}
    timed["default/0/96"] = 2.0
    (found,) = comparisons(load_bench(write_bench({name: [ms] * 7 for name, ms in timed.items()})))
    assert found.figures["equal time"] is not None
    assert found.figures["equal time"].median == exactly(pytest.approx(1.1))


def test_who_had_nothing_when_it_ended_had_nothing_in_equal_time(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("stock"), [(20.0, 8.0, 32)], 90.0)
    write_run(spec("default"), [], 30.0)
    timed = {"stock/0/32": [8.0] * 7, "stock/0/final": [8.0] * 7}
    (found,) = comparisons(load_bench(write_bench(timed)))
    assert found.figures["equal time"] == spread([Interval(0.0, 1.0)])


def test_what_a_playoff_chose_counts_from_its_end_on(bench: Bench) -> None:
    for cut in ("64", "96"):
        bench.neutral["te:C2D"][f"default/0/{cut}"] = dict.fromkeys(range(-7, 0), 2.5)
    (found,) = comparisons(bench)
    assert found.figures["time to q"] == spread([exactly(90.0 / 50.0)])


def test_never_is_a_bound(bench: Bench) -> None:
    for cut in ("64", "96", "final"):
        bench.neutral["te:C2D"][f"default/0/{cut}"] = dict.fromkeys(range(-7, 0), 2.5)
    (found,) = comparisons(bench)
    assert found.figures["time to q"] == spread([Interval(0.0, 90.0 / 50.0)])
    assert "< 1.80" in comparison_table(bench, "stock")
    assert overall([found], "default")["time to q"][0].low == 0.0
    lost = "- default on te:C2D, time to q: < 1.80, 1 of 1 never there"
    assert lost in loss_list(bench, "stock").splitlines()


def test_a_difference_below_the_noise_is_called_that(bench: Bench) -> None:
    assert "within the noise" not in comparison_table(bench, "stock")
    bench.neutral["te:C2D"]["default/0/final-copy"] = dict.fromkeys(range(-7, 0), 2.3)
    (found,) = comparisons(bench)
    assert found.is_noise("equal trials")
    assert not found.is_noise("equal time")
    assert not found.is_noise("time to q")
    assert "1.10, within the noise" in comparison_table(bench, "stock")


def test_without_copies_nothing_is_noise(bench: Bench) -> None:
    del bench.neutral["te:C2D"]["default/0/final-copy"]
    (found,) = comparisons(bench)
    assert math.isnan(found.noise)
    assert not found.is_noise("equal trials")


def test_over_workloads_the_worst_is_named(bench: Bench) -> None:
    found = comparisons(bench)
    mean, worst, name = overall(found, "default")["equal trials"]
    assert mean.low == pytest.approx(1.1)
    assert (worst, name) == (exactly(2.2 / 2.0), "te:C2D")
    assert overall(found, "paper") == {}


def test_a_workload_where_a_run_never_got_there_is_the_worst(bench: Bench) -> None:
    (known,) = comparisons(bench)
    figures = dict(known.figures, **{"time to q": spread([Interval(0.0, 99.0), exactly(99.0)])})
    never = dataclasses.replace(known, workload="te:NRM", figures=figures)
    _, worst, name = overall([known, never], "default")["time to q"]
    assert (worst.low, name) == (0.0, "te:NRM")


def test_losses_are_listed(bench: Bench) -> None:
    assert losses(comparisons(bench)) == []
    for name in ("final", "final-copy"):
        bench.neutral["te:C2D"][f"default/0/{name}"] = dict.fromkeys(range(-7, 0), 2.75)
    (found,) = losses(comparisons(bench))
    assert found[:3] == ("default", "te:C2D", "equal trials")
    assert loss_list(bench, "stock") == "- default on te:C2D, latency, equal trials: 0.80"


def test_who_had_nothing_yet_is_a_bound_on_either_side(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    timed = {"stock/0/final": [2.0], "default/0/final": [1.0]}
    write_run(spec("stock"), [(80.0, 2.0, 64)], 90.0)
    write_run(spec("default"), [(5.0, 1.0, 64)], 10.0)
    (found,) = comparisons(load_bench(write_bench(timed)))
    assert found.figures["equal time"] is not None
    assert found.figures["equal time"].median == Interval(2.0, math.inf)
    write_run(spec("stock"), [(5.0, 2.0, 64)], 10.0)
    write_run(spec("default"), [(80.0, 1.0, 64)], 90.0)
    (found,) = comparisons(load_bench(write_bench(timed)))
    assert found.figures["equal time"] is not None
    assert found.figures["equal time"].median == Interval(0.0, 2.0)


def test_journals_with_few_incumbents_timed_anew_give_bounds(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("stock"), [(20.0, 8.0, 32), (40.0, 4.0, 64), (80.0, 2.0, 96)], 90.0)
    write_run(spec("long"), [(4.0, 2.5, 96), (10.0, 1.9, 192), (60.0, 1.0, 384)], 85.0)
    timed = {"stock/0/final": [2.0], "stock/0/96": [2.2], "long/0/final": [1.1]}
    (found,) = comparisons(load_bench(write_bench({**timed, "long/0/96": [2.5]})))
    # Stock had it after 20 to 80 s, ours after 10 to 85: what it had after 4 was too slow.
    assert found.figures["time to q"] is not None
    assert found.figures["time to q"].median == Interval(20 / 85, 80 / 10)
    assert found.timed == (2, 6)
    assert found.figures["equal trials"] == spread([exactly(2.0 / 2.5)])


def test_fewer_trials_than_the_baselines_are_not_compared_as_equal(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("stock"), [(80.0, 2.0, 96)], 90.0)
    write_run(spec("default"), [(20.0, 1.0, 64)], 30.0)
    timed = {"stock/0/final": [2.0], "default/0/final": [1.0]}
    (found,) = comparisons(load_bench(write_bench(timed)))
    assert found.figures["equal trials"] is None


def test_better_than_a_baseline_that_found_nothing_is_no_merit(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("stock"), [(80.0, None, 64)], 90.0)
    write_run(spec("default"), [(5.0, 1.0, 64)], 10.0)
    bench = load_bench(write_bench({"stock/0/final": [50.0], "default/0/final": [1.0]}))
    (found,) = comparisons(bench)
    assert (found.n_pairs, set(found.figures.values())) == (0, {None})
    assert loss_list(bench, "stock") == "- te:C2D, stock/0: found nothing; 1 of 64 trials failed"


def test_without_the_neutral_measurement_nothing_is_compared(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("stock"), [(80.0, 2.0, 64)], 90.0)
    write_run(spec("default"), [(5.0, 1.0, 64)], 10.0)
    bench = load_bench(write_bench())
    (found,) = comparisons(bench)
    assert set(found.figures.values()) == {None}
    # The earlier estimator took what runs recorded.
    assert found.scaled == pytest.approx(80 / 5)
    assert "| 16.00 |" in comparison_table(bench, "stock", old=True)


def test_the_first_trials_are_compared_without_stock(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("no-start"), [(9.0, 4.0, 16), (20.0, 2.0, 32)], 25.0)
    write_run(spec("with-starter"), [(5.0, 2.0, 4), (20.0, 1.0, 32)], 25.0)
    timed = {"no-start/0/16": [4.0], "no-start/0/32": [2.0], "no-start/0/final": [2.0]}
    timed |= {"with-starter/0/4": [2.05], "with-starter/0/32": [1.0], "with-starter/0/final": [1.0]}
    bench = load_bench(write_bench(timed))
    (found,) = comparisons(bench, baseline_of(bench.methods))
    assert (found.method, found.figures["trials to q"]) == ("with-starter", spread([exactly(8.0)]))


def test_the_table_marks_operators_that_nothing_was_chosen_on(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec("stock", workload="te:CAP"), [(80.0, 2.0, 64)], 90.0)
    write_run(spec("default", workload="te:CAP"), [(5.0, 1.0, 64)], 10.0)
    assert "| te:CAP * | default |" in comparison_table(load_bench(write_bench()), "stock")


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

    timers: dict[str, Timer] = {
        name: (lambda name=name: timer(name, 1.0)) for name in ("a", "bad", "b")
    }
    timers["nonsense"] = lambda: float("nan")
    errors: dict[str, str] = {}
    samples = interleave(timers, 3, errors)
    assert asked.count("bad") == 1
    rounds = [name for name in asked if name != "bad"]
    assert [sorted(rounds[n : n + 2]) for n in (0, 2, 4)] == [["a", "b"]] * 3
    assert rounds[:2] != rounds[2:4] or rounds[2:4] != rounds[4:]  # not always in one order
    assert samples == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert errors == {"bad": "it crashed", "nonsense": "measured nan ms, which is no time"}


def test_an_untuned_network_is_asked_in_the_first_rounds_only() -> None:
    timers: dict[str, Timer] = {"winner": lambda: 1.0, "untuned": lambda: 9.0}
    samples = interleave(timers, 5, {})
    assert samples == {"winner": [1.0] * 5, "untuned": [9.0] * 3}
