from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.journals import BENCH_JOURNAL, load_bench, read_events
from benchmarks.methods import METHODS, choose_methods
from benchmarks.plan import OUTCOME_FILE, RunSpec, is_finished, read_outcome
from benchmarks.run import do_run, main, make_spec, parse, why_not
from benchmarks.workloads import SIZES, UNNAMED, WORKLOADS, choose_workloads
from tvm_adaptive.measure_callback.journal import Journal
from tvm_adaptive.tuning.target import n_cores_of, resolve_target

ROOT = Path(__file__).parents[2]
Spec = Callable[..., RunSpec]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with contextlib.closing(Journal(tmp_path / BENCH_JOURNAL)) as journal:
        yield journal


@pytest.mark.parametrize(
    ("workload", "words", "trials", "budget_sec"),
    [
        ("te:C2D", [], 256, None),
        ("te:C2D", ["--trials", "8"], 8, None),
        ("te:C2D", ["--budget", "5m"], None, 300.0),
        ("te:C2D", ["--budget", "5m", "--trials", "8"], 8, 300.0),
        ("resnet18", [], None, 600.0),
        ("resnet18", ["--trials", "8"], None, 600.0),
        ("resnet18", ["--budget", "5m"], None, 300.0),
        ("resnet18", ["--network-trials", "9"], 9, None),
        ("te:C2D", ["--network-trials", "9"], 256, None),
        ("resnet18", ["--budget", "5m", "--network-budget", "1h"], None, 3600.0),
    ],
)
def test_operators_are_bounded_by_trials_and_networks_by_seconds(
    workload: str, words: list[str], trials: int | None, budget_sec: float | None
) -> None:
    options = parse(["--size", "small", "--out", "somewhere", *words])
    made = make_spec(
        WORKLOADS[workload],
        METHODS["stock"],
        1,
        size=SIZES["small"],
        options=options,
        n_threads=2,
    )
    assert (made.trials, made.budget_sec) == (trials, budget_sec)
    assert (made.seed, made.target, made.n_threads) == (1, "cpu", 2)


def test_a_method_may_make_more_trials_of_an_operator() -> None:
    def made(workload: str) -> RunSpec:
        options = parse(["--size", "small", "--out", "somewhere"])
        method = METHODS["long"]
        return make_spec(
            WORKLOADS[workload], method, 0, size=SIZES["small"], options=options, n_threads=2
        )

    assert made("te:GMM").trials == 4 * SIZES["small"].trials
    assert (made("resnet18").trials, made("resnet18").budget_sec) == (None, 600.0)


def test_a_target_that_is_not_there_is_skipped_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "kind" in why_not('{"kind": "abacus"}')
    assert main(["--out", str(tmp_path / "out"), "--target", '{"kind": "abacus"}']) == 0
    assert capsys.readouterr().out.startswith("skipped: target kind must be one of")
    assert not (tmp_path / "out").exists()


def test_an_unknown_name_is_reported_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "out"), "--methods", "best"]) == 2
    assert "methods are stock" in capsys.readouterr().err


def test_other_settings_than_those_of_a_run_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--out", str(tmp_path), "--workloads", "te:C2D", "--methods", "stock", "--seeds", "1"]
    options = parse([*words, "--trials", "7"])
    (workload,), (method,) = choose_workloads(["te:C2D"]), choose_methods(["stock"])
    n_threads = n_cores_of(resolve_target("cpu"))
    run = make_spec(workload, method, 0, size=UNNAMED, options=options, n_threads=n_threads)
    (tmp_path / run.folder).mkdir(parents=True)
    outcome = {"spec": dataclasses.asdict(run), "status": "done"}
    (tmp_path / run.folder / OUTCOME_FILE).write_text(json.dumps(outcome))
    assert main([*words, "--trials", "8"]) == 2
    assert "Give another --out" in capsys.readouterr().err
    assert not (tmp_path / BENCH_JOURNAL).exists()


@pytest.mark.slow
def test_a_run_that_fails_is_a_result_and_one_that_was_killed_starts_again(
    tmp_path: Path, journal: Journal, spec: Spec, capsys: pytest.CaptureFixture[str]
) -> None:
    run = spec(workload="te:NONE")
    folder = tmp_path / run.folder
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text("of a run that was killed\n")
    do_run(tmp_path, run, journal, "1 of 1")
    # What the killed run left is not continued.
    left = folder / "journal.jsonl"
    assert not left.exists() or "killed" not in left.read_text()
    outcome = read_outcome(folder)
    assert outcome is not None
    assert outcome["status"] == "failed"
    assert "workload must be one of" in outcome["message"]
    assert is_finished(tmp_path, run)
    do_run(tmp_path, run, journal, "1 of 1")
    assert "finished before" in capsys.readouterr().out
    events = [event["event"] for event in read_events(tmp_path / BENCH_JOURNAL)]
    assert events == ["journal", "run-start", "run-end"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_smallest_size_goes_from_tuning_to_tables(tmp_path: Path) -> None:
    out = tmp_path / "smoke"
    for module, words in (
        ("benchmarks.run", ["--size", "smoke", "--out", str(out)]),
        ("benchmarks.compare", [str(out)]),
    ):
        command = [sys.executable, "-m", module, *words]
        subprocess.run(command, cwd=ROOT, env=dict(os.environ), check=True)
    bench = load_bench(out)
    assert {run.key for run in bench.runs} == {"stock/0", "default/0"}
    assert [run.failure for run in bench.runs] == ["", ""]
    assert {"stock/0/final", "default/0/final"} <= set(bench.neutral["te:GMM"])
    assert set(bench.noise) == {"before", "after"}
    assert "| te:GMM | default | 1 |" in (out / "report" / "tables.md").read_text()
