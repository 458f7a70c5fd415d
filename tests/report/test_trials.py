from __future__ import annotations

import math
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_page import CHROMIUM, dom_of
from tvm_adaptive.cli import main
from tvm_adaptive.measure_callback.history import History
from tvm_adaptive.measure_callback.journal import Journal, follow
from tvm_adaptive.report import read_run
from tvm_adaptive.report.demo import read_demo
from tvm_adaptive.report.history import RunHistory
from tvm_adaptive.report.run_options import option_differences
from tvm_adaptive.report.tables import trial_table
from tvm_adaptive.report.trials import TrialJoiner, TrialRow, fastest_trials, source_shares

N_TRIALS, BATCH = 20_000, 16


def joined(round_: dict[str, Any], latencies_ms: list[float | None]) -> list[TrialRow]:
    joiner = TrialJoiner()
    joiner.add_round({"task": "a", "n_candidates": len(latencies_ms), **round_})
    for index, ms in enumerate(latencies_ms):
        timing = {"index": index, "mean_sec": ms and ms / 1e3, "stderr_sec": (ms or 0) / 1e5}
        joiner.add_timing({**timing, "reason": "precise", "elapsed_sec": 0.5})
    return joiner.add_measured({"task": "a", "latencies_ms": latencies_ms}, "winograd-2x2")


def test_sources_stand_in_the_order_of_a_batch() -> None:
    counts = {"n_seeded": 1, "n_analytical": 2, "n_prefetching": 1, "n_random": 1}
    rows = joined(counts, [4.0, 2.0, None, 2.5, 3.0, 1.0])
    sources = ["seed", "analytical", "analytical", "prefetching", "model", "random"]
    assert [row.source for row in rows] == sources
    assert [row.improves for row in rows] == [True, True, False, False, False, True]
    first, failed = rows[0], rows[2]
    assert (first.form, first.reason, first.seconds) == ("winograd-2x2", "precise", 0.5)
    assert first.error == pytest.approx(0.01)
    assert math.isnan(failed.ms)
    assert failed.reason == ""
    (seed, analytical, prefetching, model, random) = source_shares(rows)
    assert (seed.n_firsts, seed.n_winners, seed.n_improvements) == (1, 0, 0)
    assert (analytical.n_trials, analytical.n_errors, analytical.n_improvements) == (2, 1, 1)
    assert (prefetching.n_trials, model.n_improvements, random.n_winners) == (1, 0, 1)


def test_what_a_killed_attempt_proposed_is_not_what_the_next_one_measured(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for names in ({"n_seeded": 2}, {"n_random": 2}):
        journal.write("journal")
        journal.write("round", task="a", n_candidates=2, **names)
    journal.write("measured", task="a", latencies_ms=[2.0, 1.0], weighted_ms=1.0)
    journal.close()
    assert [trial.source for trial in read_run(tmp_path).trials] == ["random", "random"]


def test_recalled_candidates_are_no_seeds() -> None:
    (row,) = joined({"reason": "recalled", "n_seeded": 1}, [1.0])
    assert row.source == "recalled"


def test_without_all_results_of_a_batch_no_source_is_guessed() -> None:
    (row,) = joined({"n_candidates": 2, "n_seeded": 1}, [1.0])
    assert row.source == ""
    assert source_shares([row]) == []


def test_a_corrected_time_finds_its_timing() -> None:
    joiner = TrialJoiner()
    for index, sec in enumerate([0.003, 0.004]):
        joiner.add_timing({"index": index, "mean_sec": sec, "reason": f"reason {index}"})
    # The second time is what the first was as measured.
    both = {"raw_sec": [0.003, 0.004], "corrected_sec": [0.002, 0.003]}
    joiner.add_duet({**both, "relative_errors": [0.05, 0.1]})
    rows = joiner.add_measured({"task": "a", "latencies_ms": [2.0, 3.0]}, "")
    assert [(row.ms, row.reason) for row in rows] == [(2.0, "reason 0"), (3.0, "reason 1")]
    assert [row.error for row in rows] == pytest.approx([0.05, 0.1])


def test_a_timing_of_another_batch_is_not_taken() -> None:
    joiner = TrialJoiner()
    joiner.add_timing({"index": 0, "mean_sec": 0.5, "reason": "raced", "elapsed_sec": 1.0})
    (row,) = joiner.add_measured({"task": "a", "latencies_ms": [1.0]}, "")
    assert row.reason == ""
    assert math.isnan(row.seconds)


@pytest.mark.parametrize("keeps_all", [False, True])
def test_a_trial_that_a_play_off_refuted_is_nowhere_the_fastest(
    tmp_path: Path, keeps_all: bool
) -> None:
    path, decisions = tmp_path / "journal.jsonl", [[0, [[2, 4]]], [0, [[4, 2]]]]
    candidates = [
        {"recorded_ms": 0.125, "disqualified": "wrong result: output 0"},
        {"recorded_ms": 1.0, "disqualified": "build: no memory"},  # no verdict
        {"recorded_ms": None, "disqualified": "it crashed"},  # a draft
    ]
    with closing(Journal(path)) as journal:
        journal.write("tasks", tasks=[{"name": "conv"}, {"name": "other"}])
        journal.write("round", task="conv", n_candidates=2, decisions=decisions)
        for task in ("conv", "other"):
            journal.write("measured", task=task, latencies_ms=[0.125, 1.0], weighted_ms=0.25)
        journal.write("playoff", task="conv", candidates=candidates)
    history = RunHistory(keeps_all=keeps_all)
    follow(path, history.add)
    conv, other = history.tasks["conv"], history.tasks["other"]
    sums_ms = (conv.best_ms, other.best_ms, history.weighted_ms)
    assert sums_ms == pytest.approx((1.0, 0.125, 1.125))
    assert conv.latencies_ms == pytest.approx([math.nan, 1.0], nan_ok=True)
    assert (conv.n_trials, conv.n_errors) == (2, 0)
    if not keeps_all:
        return
    trials = read_run(tmp_path).trials
    refuted, sound, *others = trials
    fastest = fastest_trials(trials)
    assert (fastest["conv"] is sound, fastest["other"] is others[0]) == (True, True)
    assert (sound.ms, sound.improves) == (1.0, True)
    assert math.isnan(refuted.ms)
    assert (refuted.reason, refuted.improves) == ("disqualified", False)
    words = trial_table(trials).split('"words":')[1].split("]")[0]
    assert '"disqualified"' in words
    assert '"1: 2 x 4"' in words  # the refuted one is compared with the fastest
    assert '"failed"' not in words
    with closing(Journal(path)) as journal:
        journal.write("measured", task="conv", latencies_ms=[0.5])
    assert read_run(tmp_path).trials[-1].improves


def test_the_kept_run_has_sources_reasons_and_forms() -> None:
    history = read_demo()
    assert len(history.trials) == history.n_trials > 100
    assert {row.source for row in history.trials} >= {"seed", "analytical"}
    assert any(row.form.startswith("winograd") for row in history.trials)
    assert sum(row.reason != "" for row in history.trials) > 0.9 * history.n_trials
    fastest = {name: task.best_ms for name, task in history.tasks.items()}
    n_winners = sum(share.n_winners for share in source_shares(history.trials))
    assert n_winners == sum(map(math.isfinite, fastest.values()))


def test_options_that_differ_are_named_with_their_groups() -> None:
    runs = [
        {"event": "run", "seed": 0, "config": {"search": {"lanes": 1, "ray": None}}},
        {"event": "run", "seed": 0, "config": {"search": {"lanes": 2, "ray": None}}, "new": "x"},
    ]
    for number, run in enumerate(runs):
        run |= {"run_id": str(number), "elapsed_sec": 1.0 + number, "resumed": number > 0}
    found = option_differences([History(run=run) for run in runs])
    assert found == {"config.search.lanes": ["1", "2"], "new": ["-", "x"]}


def test_other_input_shapes_are_options_that_differ() -> None:
    model = {"event": "model", "what": "encoder.onnx", "content": "sha256:a", "inputs": None}
    models = [{**model, "time_sec": n, "input_shapes": {"ids": [1, n]}} for n in (128, 512)]
    found = option_differences([History(model=model) for model in models])
    assert found == {"model.input_shapes.ids": ["[1, 128]", "[1, 512]"]}


def test_a_report_without_a_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 2
    assert "--demo" in capsys.readouterr().err


def test_the_kept_run_is_shown(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main(["report", "--demo", "--out", str(out)]) == 0
    text = out.read_text()
    for key in ("ratios", "peers", "sources", "trials", "stages"):
        assert f'id="{key}"' in text


def write_long_run(folder: Path) -> None:
    """Write a run of many trials, whose fastest is the last."""
    journal = Journal(folder / "journal.jsonl")
    journal.write("run", what="net", target={"kind": "llvm"}, seed=1)
    for number in range(N_TRIALS // BATCH):
        task = f"fused_conv2d{number % 40}_add_relu"
        journal.write("slot", task=task, reason="index", gain=0.1, unit="ms/s")
        counts = {"n_candidates": BATCH, "n_seeded": 0, "n_analytical": 0, "n_random": 2}
        splits = [[0, [[number % 7 + 1, place + 1, 8, 1]] * 4] for place in range(BATCH)]
        explored = {"epsilon": 0.1, "mean_std": 0.2, "reason": "posterior", "decisions": splits}
        journal.write("round", task=task, **explored, **counts)
        journal.write("build", n=BATCH, n_errors=0, seconds=0.7)
        latencies_ms = [1e3 / (1 + number * BATCH + place) for place in range(BATCH)]
        for place, ms in enumerate(latencies_ms):
            timing = {"mean_sec": ms / 1e3, "stderr_sec": ms / 1e5, "elapsed_sec": 0.02}
            index = number * BATCH + place
            journal.write("timing", index=index, error=None, reason="precise", **timing)
        journal.write("forecast", task=task, n=BATCH, spearman=0.4, z_rms=1.1)
        measured = {"task": task, "weight": 1.0, "flop": 1e8, "weighted_ms": 40.0}
        journal.write("measured", latencies_ms=latencies_ms, **measured)
        journal.write("slot-end", task=task, seconds=0.5, n_trials=BATCH, best_ms=1.0)
    journal.close()


# Uses the table as a person does, and leaves what it shows in the title.
USE = """<script>
addEventListener("load", () => {
  const cells = () => [...document.querySelectorAll("#trial-table tbody tr")].map(r => r.innerText);
  const said = [];
  const [,,, ms] = document.querySelectorAll("#trial-table th button");
  ms.click(); said.push(cells().length, cells()[0]);
  const filter = document.getElementById("trial-filter");
  filter.value = "conv2d7_ RANDOM"; filter.dispatchEvent(new Event("input"));
  said.push(document.getElementById("trial-count").textContent);
  document.getElementById("trial-next").click();
  said.push(document.getElementById("trial-count").textContent);
  document.title = "said " + said.join(" | ");
});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_twenty_thousand_trials_open_at_once_and_can_be_searched(tmp_path: Path) -> None:
    write_long_run(tmp_path)
    assert len(read_run(tmp_path).trials) == N_TRIALS
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "--out", str(out)]) == 0
    out.write_text(out.read_text().replace("</body>", USE + "</body>"))
    dom, log = dom_of(out, tmp_path)
    assert "Uncaught" not in log
    (said,) = re.findall("<title>said (.*?)</title>", dom, re.DOTALL)
    n_rows, first, count, later = said.split(" | ")
    assert n_rows == "100"
    assert first.split("\t")[3] == "0.05"  # the fastest of all
    n_found = N_TRIALS // BATCH // 40 * 2 + 2  # two random ones in each round of the task
    assert count == f"{n_found} of 20000 trials, page 1 of 1"
    assert later == count
