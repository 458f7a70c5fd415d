from __future__ import annotations

import contextlib
import json
import lzma
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.journals import (
    Incumbent,
    incumbents_of,
    load_bench,
    median_of,
    read_rounds,
    stage_seconds,
)
from benchmarks.pack import pack
from benchmarks.plan import RunSpec, write_outcome
from tvm_adaptive.measure_callback.journal import Journal

Spec = Callable[..., RunSpec]
Write = Callable[..., Path]


def write_rounds(run: Path, ms: dict[str, float]) -> None:
    with contextlib.closing(Journal(run.parents[1] / "neutral.jsonl")) as journal:
        journal.write("round", ms=ms, errors={})


def test_a_run_is_read_from_its_journal(spec: Spec, write_run: Write, write_bench: Write) -> None:
    write_run(spec(), [(10.0, None, 16), (20.0, 4.0, 32), (30.0, 2.0, 48)], finish_sec=40.0)
    (run,) = load_bench(write_bench()).runs
    assert run.spec == spec()
    assert run.curve.best_ms == (math.inf, 4.0, 2.0)
    assert run.curve.trials == (16, 32, 48)
    assert (run.curve.end_sec, run.finish_sec) == (31.0, 40.0)
    assert (run.n_trials, run.n_errors, run.peak_mb) == (48, 1, 100.0)
    assert run.stages["build"] == 3.0


def test_what_continued_a_journal_later_does_not_count(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    folder = write_run(spec(), [(10.0, 4.0, 16)], finish_sec=12.0)
    with open(folder / "journal.jsonl", "a") as file:
        file.write('{"event":"journal","time_sec":0,"version":1}\n')
        file.write('{"event":"measured","time_sec":1,"task":"main","weighted_ms":1}\n')
    (run,) = load_bench(write_bench()).runs
    assert run.curve.best_ms == (4.0,)


def test_trials_of_several_tasks_add_up(spec: Spec, write_run: Write, write_bench: Write) -> None:
    folder = write_run(spec(), [(10.0, None, 16), (20.0, 4.0, 16)], finish_sec=30.0)
    text = (folder / "journal.jsonl").read_text()
    (folder / "journal.jsonl").write_text(text.replace('"task": "main"', '"task": "one"', 1))
    (run,) = load_bench(write_bench()).runs
    assert run.curve.trials == (16, 32)
    assert run.n_errors == 2


def test_a_failed_run_says_why(tmp_path: Path, spec: Spec, write_bench: Write) -> None:
    folder = tmp_path / spec().folder
    folder.mkdir(parents=True)
    write_outcome(folder, spec(), status="failed", message="exit code 1", seconds=3.0)
    bench = load_bench(write_bench())
    assert bench.runs[0].failure == "exit code 1"
    assert bench.of("te:C2D", "stock") == []


def test_an_incumbent_has_its_own_trial_and_its_batchs_second() -> None:
    events = [
        {"time_sec": 5.0, "task": "main", "weighted_ms": 3.0, "latencies_ms": [None, 3.0, 4.0]},
        {"time_sec": 6.0, "task": "main", "weighted_ms": 3.0, "latencies_ms": [3.5, 9.0]},
        {"time_sec": 9.0, "task": "main", "weighted_ms": 1.0, "latencies_ms": [2.0, 1.0, 1.5]},
    ]
    found = incumbents_of(events, [3, 5, 8])
    assert found == (Incumbent(2, 5.0, 3.0), Incumbent(7, 9.0, 1.0))
    # Of two tasks, batches.
    two = [{**event, "task": str(number)} for number, event in enumerate(events)]
    assert incumbents_of(two, [3, 5, 8]) == (Incumbent(3, 5.0, 3.0), Incumbent(8, 9.0, 1.0))


def test_rounds_are_read_as_they_were_made_and_failures_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "neutral.jsonl"
    with contextlib.closing(Journal(path)) as journal:
        journal.write("plan", entries=["a", "b"])
        journal.write("round", ms={"a": 1.0, "b": 2.0}, errors={})
        journal.write("round", ms={"a": 1.5}, errors={"b": "it crashed"})
    assert read_rounds(path) == ({"a": {0: 1.0, 1: 1.5}}, {"b": "it crashed"})
    assert read_rounds(tmp_path / "none.jsonl") == ({}, {})


def test_a_packed_benchmark_reads_alike(
    tmp_path: Path, spec: Spec, write_run: Write, write_bench: Write
) -> None:
    folder = write_run(spec(), [(10.0, 4.0, 16)], finish_sec=30.0)
    (folder / "library.so").write_text("large")
    source = write_bench()
    write_rounds(folder, {"stock/0/final": 3.0, "stock/0/16": 3.5})
    target = tmp_path.with_name(tmp_path.name + "-packed")
    assert pack(source, target) == 1
    assert set(load_bench(target).neutral["te:C2D"]) == {"stock/0/final", "stock/0/16"}
    assert load_bench(target) == load_bench(source)
    assert not list(target.rglob("*.so"))
    with pytest.raises(FileExistsError, match=r"packed holds .*stock.0 already"):
        pack(source, target)


def test_runs_that_are_packed_later_join_those_that_are_there(
    tmp_path: Path, spec: Spec, write_run: Write, write_bench: Write
) -> None:
    first = write_run(spec(), [(10.0, 4.0, 16)], finish_sec=30.0)
    source = write_bench()
    write_rounds(first, {"stock/0/final": 3.0})
    target = tmp_path.with_name(tmp_path.name + "-packed")
    pack(source, target)
    shutil.rmtree(first)
    second = write_run(spec(seed=1), [(10.0, 6.0, 16)], finish_sec=20.0)
    (second.parents[1] / "neutral.jsonl").unlink()
    write_rounds(second, {"stock/1/final": 5.0})
    assert pack(source, target) == 1
    bench = load_bench(target)
    assert sorted(run.spec.seed for run in bench.runs) == [0, 1]
    assert [bench.neutral_ms(run) for run in bench.of(spec().workload, "stock")] == [3.0, 5.0]


def test_a_pack_that_was_killed_is_repeated(
    tmp_path: Path,
    spec: Spec,
    write_run: Write,
    write_bench: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_run(spec(), [(10.0, 4.0, 16)], finish_sec=30.0)
    source = write_bench()
    write_rounds(folder, {"stock/0/final": 3.0, "stock/0/16": 3.5})
    target = tmp_path.with_name(tmp_path.name + "-packed")

    def kill(*_arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("benchmarks.pack.shutil.copy", kill)
        with pytest.raises(KeyboardInterrupt):
            pack(source, target)
    assert pack(source, target) == 1
    assert load_bench(target) == load_bench(source)
    before, after = (read_rounds(each / "te-C2D" / "neutral.jsonl")[0] for each in (source, target))
    assert after == before


def test_a_journal_that_has_grown_since_it_was_packed_is_there_once(
    tmp_path: Path, spec: Spec, write_run: Write, write_bench: Write
) -> None:
    folder = write_run(spec(), [(10.0, 4.0, 16)], finish_sec=30.0)
    source = write_bench()
    write_rounds(folder, {"stock/0/final": 3.0})
    target = tmp_path.with_name(tmp_path.name + "-packed")
    pack(source, target)
    write_rounds(folder, {"stock/0/final": 3.5})
    shutil.rmtree(target / spec().folder)
    pack(source, target)
    before, after = (read_rounds(each / "te-C2D" / "neutral.jsonl")[0] for each in (source, target))
    assert after == before
    assert len(after["stock/0/final"]) == 2


def test_invocations_on_other_machines_are_distinguished(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec(), [(10.0, 4.0, 16)], finish_sec=30.0)
    folder = write_bench()
    ended = {"event": "run-end", "workload": "te:C2D", "method": "stock"}
    events = [
        {**ended, "seed": 0},
        {"event": "bench", "cpu": "another", "commit": "abc", "seeds": "not this one's"},
        {**ended, "seed": 2},
        {"event": "bench", "cpu": "a processor"},
        {**ended, "seed": 1},
    ]
    with open(folder / "bench.jsonl", "a") as file:
        file.writelines(json.dumps({**event, "time_sec": 2.0}) + "\n" for event in events)
    found = [(machine["cpu"], machine["seeds"]) for machine in load_bench(folder).machines]
    assert found == [("a processor", {0, 1}), ("another", {2})]


def test_of_several_invocations_the_noisiest_is_reported(
    tmp_path: Path, spec: Spec, write_run: Write, write_bench: Write
) -> None:
    write_run(spec(), [(10.0, 4.0, 16)], finish_sec=30.0)
    folder = write_bench()
    with open(folder / "bench.jsonl", "a") as file:
        for spread in (0.3, 0.1):
            noise = {"event": "noise", "time_sec": 2.0, "when": "before", "spread": spread}
            file.write(json.dumps({**noise, "drift": 0.0, "noisy": spread > 0.1}) + "\n")
    assert load_bench(folder).noise["before"]["spread"] == 0.3


def test_where_a_benchmark_lay_is_left_out(
    tmp_path: Path, spec: Spec, write_run: Write, write_bench: Write
) -> None:
    folder = write_run(spec(), [(10.0, 4.0, 16)], finish_sec=30.0)
    source = write_bench({"stock/0/final": [3.0]})
    with open(folder / "journal.jsonl", "a") as file:
        file.write(json.dumps({"event": "note", "time_sec": 31.0, "at": f"{source}/x.so"}) + "\n")
    target = tmp_path.with_name(tmp_path.name + "-packed")
    pack(source, target)
    (packed,) = target.glob("*/*/*/journal.jsonl.xz")
    text = lzma.decompress(packed.read_bytes()).decode()
    assert '"x.so"' in text
    assert str(source) not in text


def test_a_folder_without_a_benchmark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"bench\.jsonl"):
        load_bench(tmp_path)


def test_stages_do_not_overlap() -> None:
    scopes = {
        "InitializeTask": 1.0,
        "SendToBuilder": 2.0,
        "SendToRunner": 3.0,
        "JoinRunnerFutures": 1.0,
        "MeasureCallback/UpdateCostModel": 1.5,
        "Total": 99.0,
    }
    found = stage_seconds({"prepare": 4.0, "search": 10.0}, scopes)
    expected = {"start": 1.0, "build": 2.0, "measure": 4.0, "learn": 1.5, "propose": 1.5}
    assert found == {**expected, "prepare": 4.0}
    assert sum(found.values()) == 14.0


def test_the_median_of_nothing_is_nan() -> None:
    assert math.isnan(median_of(None))
    assert median_of([3.0, 1.0, 2.0]) == 2.0
    assert median_of([1.0, 2.0]) == 1.5
