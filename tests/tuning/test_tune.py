import gc
import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tvm
import tvm.te
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.testing.te_workload import create_te_workload

from tests.tuning.observers import NoObserver
from tvm_adaptive import TuneConfig, tune, tune_relax, tune_tir
from tvm_adaptive._tvm import relax, save_json
from tvm_adaptive.database.location import user_store
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import InvalidOptionError, StoreError
from tvm_adaptive.measure_callback import read_journal
from tvm_adaptive.models import resnet18
from tvm_adaptive.models.run import run_exported
from tvm_adaptive.tuning import registry
from tvm_adaptive.tuning.config import (
    DEFAULT,
    FinishConfig,
    MeasureConfig,
    SchedulerConfig,
    SearchConfig,
)
from tvm_adaptive.tuning.deploy import APPLY_FILE, apply
from tvm_adaptive.tuning.inspect import shown_tasks
from tvm_adaptive.tuning.registry import check_names
from tvm_adaptive.tuning.session import Session

QUICK = TuneConfig(
    search=SearchConfig(n_trials_per_round=4, population_size=64, genetic_num_iters=1),
    finish=FinishConfig(top_k=2, max_task_sec=0.5),
)


# README's table: stock names, then those added here.
NAMES = {
    "cost_model": ("xgb", "mlp", "random", "rfei", "rfei-family"),
    "strategy": ("evolutionary", "replay-trace", "replay-func", "adaptive"),
    "runner": ("local", "rpc", "adaptive", "adaptive-rpc"),
    "builder": ("local", "persistent"),
    "task_scheduler": (
        *("gradient", "round-robin", "dynatune", "random", "linear", "epsilon-greedy", "softmax"),
        *("adaptive-round-robin", "adaptive-gradient"),
    ),
}


def gmm():
    return tvm.IRModule({"main": create_te_workload("GMM", 0)})


def test_a_network_is_no_module_of_tensor_functions(tmp_path):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 6), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.exp(x)))
    with pytest.raises(InvalidOptionError, match="no tensor function; tune_relax"):
        tune_tir(builder.get(), work_dir=tmp_path / "run", trials=8)
    assert list(tmp_path.iterdir()) == []


def test_functions_whose_sizes_are_open_are_refused(tmp_path):
    n = tvm.te.var("n")
    x = tvm.te.placeholder((n, 4), name="x")
    function = tvm.te.create_prim_func([x, tvm.te.compute((n, 4), lambda i, j: x[i, j] + 1.0)])
    module = tvm.IRModule({"main": create_te_workload("GMM", 0), "rows": function})
    with pytest.raises(InvalidOptionError, match="Arguments of rows have no fixed sizes"):
        tune_tir(module, work_dir=tmp_path / "run", trials=8)
    assert list(tmp_path.iterdir()) == []


def test_the_whole_job_on_an_operator(tmp_path):
    report = tune_tir(gmm(), work_dir=tmp_path / "run", trials=16, seed=3, config=QUICK)
    (task,) = report.tasks
    assert (task.n_trials, task.n_errors, task.played_off) == (16, 0, True)
    assert report.comparison is not None
    assert report.comparison.agree
    assert report.comparison.after_sec < report.comparison.before_sec
    assert report.coverage == "1 of 1 functions tuned"
    assert not report.interrupted
    assert math.isclose(report.weighted_sec, task.best_sec)

    final = ms.database.JSONDatabase(work_dir=str(report.database_dir))
    (record,) = final.get_all_tuning_records()
    assert [float(sec) for sec in record.run_secs] == [pytest.approx(task.best_sec)]

    events = [event["event"] for event in read_journal(tmp_path / "run" / "journal.jsonl")]
    assert events[:2] == ["journal", "run"]
    assert events[-1] == "end"
    assert {"round", "build", "timing", "fit", "measured", "playoff", "comparison", "report"} <= {
        *events
    }
    assert events.count("timing") == 16
    assert sessions_in(tmp_path / "run") == []


def sessions_in(work_dir):
    """Return the sessions of a run that something still holds."""
    gc.collect()
    return [
        each for each in gc.get_objects() if type(each) is Session and each.work_dir == work_dir
    ]


def test_a_run_that_fails_before_its_search_keeps_nothing(tmp_path, monkeypatch):
    def fail(*_arguments, **_options):
        assert len(sessions_in(tmp_path)) == 1
        raise RuntimeError("made to fail")

    monkeypatch.setattr("tvm_adaptive.tuning.tune._search", fail)
    with pytest.raises(RuntimeError, match="made to fail"):
        tune_tir(gmm(), work_dir=tmp_path, trials=16, seed=3, config=QUICK)
    assert sessions_in(tmp_path) == []


@pytest.mark.slow
def test_a_task_scheduler_of_ours_shares_the_trials(tmp_path):
    mod = tvm.IRModule({name: create_te_workload(name, 0) for name in ("GMM", "SFM")})
    config = QUICK.replace(
        task_scheduler="dynatune", scheduler=SchedulerConfig(warm_up_trials=1, slot_rounds=2)
    )
    report = tune_tir(mod, work_dir=tmp_path, trials=15, seed=3, config=config)
    assert sum(task.n_trials for task in report.tasks) == 15
    assert all(task.n_trials > 0 for task in report.tasks)
    events = read_journal(tmp_path / "journal.jsonl")
    slots = [event for event in events if event["event"] == "slot"]
    assert [(slot["reason"], slot["n_asked"]) for slot in slots[:2]] == [("warm-up", 1)] * 2
    assert {slot["task"] for slot in slots[:2]} == {"GMM", "SFM"}
    spent = [event["seconds"] for event in events if event["event"] == "slot-end"]
    (search_sec,) = [event["seconds"] for event in events if event.get("stage") == "search"]
    assert len(spent) == len(slots)
    assert sum(spent) <= search_sec


@pytest.mark.slow
def test_a_second_run_goes_on_and_measures_nothing_twice(tmp_path):
    for seed in (1, 1):
        tune_tir(gmm(), work_dir=tmp_path, trials=8, seed=seed, config=QUICK)
    database = ms.database.JSONDatabase(work_dir=str(tmp_path))
    keys = set()
    for record in database.get_all_tuning_records():
        schedule = tvm.s_tir.Schedule(record.workload.mod)
        record.trace.apply_to_schedule(schedule, remove_postproc=False)
        keys.add(schedule.mod.script())
    assert len(database) == len(keys) == 16


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "Give a budget in seconds, a number of trials, or both"),
        ({"budget_sec": -1.0}, "The budget must be above 0 s and finite but got -1"),
        ({"budget_sec": math.inf}, "The budget must be above 0 s and finite but got inf"),
        ({"trials": 0}, "trials must be at least 1 but got 0"),
        ({"trials": 1, "target": {"kind": "llvm"}}, "num-cores"),
        ({"trials": 1, "config": TuneConfig(runner="fast")}, "Unknown runner 'fast'; possible are"),
        ({"trials": 1, "config": TuneConfig(layout="odd")}, "layout must be one of"),
        ({"trials": 1, "config": TuneConfig(measure=MeasureConfig(devices="0,1"))}, "one device"),
        ({"trials": 1, "input_shapes": {"x": "1x3"}}, "input_shapes must .* but has 'x': '1x3'"),
        ({"trials": 1, "input_shapes": {"x": (None, 3)}}, "input_shapes must"),
        ({"trials": 1, "input_shapes": {"x": 3}}, "input_shapes must"),
        ({"trials": 1, "input_shapes": [1, 3]}, "input_shapes must"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(tmp_path, options, text):
    with pytest.raises(InvalidOptionError, match=text):
        tune("te:GMM", work_dir=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name",
    ["final/mine.pt", "final.new/mine.pt", "artifacts/candidate-1/mine.bin", "main.so"],
)
def test_files_of_other_programs_are_not_replaced(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    taken = tmp_path / name.partition("/")[0]
    with pytest.raises(InvalidOptionError, match=f"{taken} would be replaced, .* --work-dir"):
        tune("te:GMM", work_dir=tmp_path, trials=4, seed=1, config=QUICK)
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [path]
    assert path.read_text() == "mine"


def test_a_module_without_main_is_refused(tmp_path):
    with pytest.raises(InvalidOptionError, match="must have a Relax function main"):
        tune_relax(gmm(), work_dir=tmp_path / "run", trials=1)


@pytest.mark.parametrize(
    ("part", "name"),
    [(part, name) for part, names in NAMES.items() for name in names],
)
def test_every_name_of_every_part_passes_the_check(part, name):
    assert set(registry.names(part)) == set(NAMES[part])
    check_names(TuneConfig().replace(**{part: name}))


def test_a_relax_module_is_tuned(tmp_path):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 16, 32), "float32"))
    weights = relax.Var("weights", relax.TensorType((32, 32), "float32"))
    with builder.function("main", [x, weights], attrs={"num_input": 1}):
        with builder.dataflow():
            found = builder.emit_output(relax.op.nn.relu(relax.op.matmul(x, weights)))
        builder.emit_func_output(found)
    values = np.random.default_rng(0).standard_normal((32, 32), np.float32)
    report = tune_relax(
        builder.get(), {"weights": values}, work_dir=tmp_path, trials=4, seed=1, config=QUICK
    )
    assert report.comparison is not None
    assert report.comparison.agree
    value = np.random.default_rng(1).standard_normal((1, 16, 32), np.float32)
    (output,) = run_exported(report.library, [value])
    np.testing.assert_allclose(output, np.maximum(value @ values, 0.0), rtol=1e-4, atol=1e-4)


def wait_for(path, text, timeout_sec=120):
    end = time.monotonic() + timeout_sec
    while time.monotonic() < end:
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.2)
    pytest.fail(f"{path} never said {text}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_found(tmp_path, number):
    work_dir = tmp_path / "run"
    arguments = ["tune", "te:GMM", "--budget", "30m", "--work-dir", str(work_dir), "--seed", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tvm_adaptive", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(work_dir / "journal.jsonl", '"event":"fit"')  # now the search is native
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "interrupted" in output
    assert "Traceback" not in output
    assert len(ms.database.JSONDatabase(work_dir=str(work_dir))) >= 16
    # Nobody has checked it: it is not deployed before somebody has.
    assert len(ms.database.JSONDatabase(work_dir=str(work_dir / "final"))) == 0
    assert "apply" in output
    assert read_journal(work_dir / "journal.jsonl")[-1]["interrupted"] is True


@pytest.mark.slow
def test_a_budget_is_kept_within_a_batch(tmp_path):
    start = time.monotonic()
    report = tune("te:C2D", work_dir=tmp_path, budget_sec=90, seed=1)
    rounds = [e for e in read_journal(tmp_path / "journal.jsonl") if e["event"] == "measured"]
    longest = max(np.diff([e["time_sec"] for e in rounds], prepend=0.0)[1:], default=0.0)
    assert time.monotonic() - start <= 1.1 * 90 + longest + 5  # what was begun in time ends
    assert report.comparison is not None
    assert report.comparison.agree


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("prepack", [False, True])
def test_the_whole_job_on_a_network(tmp_path, prepack):
    network = resnet18(image_size=32, width=16, classes=10)
    config = QUICK.replace(prepack=prepack)
    report = tune_relax(
        network.mod, network.params, work_dir=tmp_path, trials=100, seed=1, config=config
    )
    assert report.comparison is not None
    assert report.comparison.agree
    assert report.comparison.after_sec < report.comparison.before_sec
    used = [task for task in report.tasks if task.is_used]  # the others are of other forms
    assert all(task.played_off for task in used)
    n_functions = len(used)
    assert report.coverage.startswith(f"{n_functions} of {n_functions} functions tuned")
    (scores,) = run_exported(report.library, network.random_inputs())
    assert scores.shape == (1, 10)
    json.dumps(report.as_fields())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_job_with_stock_parts(tmp_path):
    config = QUICK.replace(
        cost_model="xgb",
        strategy="evolutionary",
        runner="local",
        builder="local",
        task_scheduler="round-robin",
    )
    report = tune_tir(gmm(), work_dir=tmp_path, trials=8, seed=1, config=config)
    assert report.tasks[0].n_trials == 8
    assert report.comparison is not None
    assert report.comparison.agree


def decisions_of(work_dir):
    """Return (seconds, decisions) of a run's records in the order measured."""
    lines = (work_dir / "database_tuning_record.json").read_text().splitlines()
    records = [json.loads(line)[1] for line in lines]
    return [(float(np.median(record[1])), json.dumps(record[0][1])) for record in records]


@pytest.mark.slow
def test_a_second_run_begins_with_what_the_first_found(tmp_path):
    config = DEFAULT.replace(store=str(tmp_path / "records.db"))
    for number in (1, 2):
        tune("te:GMM", work_dir=tmp_path / str(number), trials=16, seed=number, config=config)
    first, second = (read_journal(tmp_path / str(n) / "journal.jsonl") for n in (1, 2))
    (reported,) = [event for event in second if event["event"] == "recalled"]
    assert (reported["n_known"], reported["n_related"], reported["n_samples"]) == (1, 0, 16)
    assert len(reported["proven"]) == 1
    assert reported["n_trials"] == {reported["proven"][0]: 16}
    rounds = [[e for e in events if e["event"] == "round"] for events in (first, second)]
    assert rounds[0][0]["n_seeded"] == 0
    assert (rounds[1][0]["n_candidates"], rounds[1][0]["reason"]) == (2, "recalled")
    before, after = (decisions_of(tmp_path / str(number)) for number in (1, 2))
    ((winner_sec, winner),) = decisions_of(tmp_path / "1" / "final")
    again = {decisions for _, decisions in after[:2]}
    assert winner in again, "what the play-off proved is measured first"
    assert again <= {decisions for _, decisions in before}
    with RecordStore(tmp_path / "records.db") as store:
        (stats,) = store.stats()
        finals = store.finals(stats.task)
    assert stats.n_trials == 32
    assert winner_sec in [each.seconds for each in finals]
    assert len({each.run for each in finals}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["no time", "interrupted"])
def test_a_run_that_measures_nothing_ends_with_what_earlier_ones_have_proven(tmp_path, way):
    config = DEFAULT.replace(store=str(tmp_path / "records.db"))
    tune("te:GMM", work_dir=tmp_path / "1", trials=8, seed=1, config=config)
    if way == "no time":
        report = tune("te:GMM", work_dir=tmp_path / "2", budget_sec=0.1, seed=2, config=config)
    else:
        observer = InterruptAtOnce()
        report = tune(
            "te:GMM", work_dir=tmp_path / "2", trials=8, seed=2, config=config, observer=observer
        )
        assert report.interrupted
    assert report.tasks[0].n_trials == 0
    ((winner_sec, winner),) = decisions_of(tmp_path / "1" / "final")
    ((again_sec, again),) = decisions_of(tmp_path / "2" / "final")
    assert (again, again_sec) == (winner, winner_sec)
    assert report.tasks[0].best_sec == winner_sec
    (shown,) = shown_tasks(tmp_path / "2")
    assert (shown.best.seconds, shown.best.is_checked) == (winner_sec, True)
    apply(tmp_path / "2", out_dir=tmp_path / "deploy")
    events = read_journal(tmp_path / "deploy" / APPLY_FILE)
    assert "playoff" not in {event["event"] for event in events}


@pytest.mark.slow
def test_tasks_that_nobody_knows_go_first(tmp_path):
    config = QUICK.replace(store=str(tmp_path / "records.db"))
    gmm = create_te_workload("GMM", 0)
    tune_tir(tvm.IRModule({"main": gmm}), work_dir=tmp_path / "1", trials=4, seed=1, config=config)
    both = tvm.IRModule({"large": gmm, "small": te_relu()})
    tune_tir(both, work_dir=tmp_path / "2", trials=8, seed=1, config=config)
    rounds = [e for e in read_journal(tmp_path / "2" / "journal.jsonl") if e["event"] == "round"]
    assert [rounds[0]["task"], rounds[1]["task"]] == ["small", "large"]
    assert rounds[1]["reason"] == "recalled"


def te_relu():
    x = tvm.te.placeholder((64, 64), name="x")
    y = tvm.te.compute((64, 64), lambda i, j: tvm.te.max(x[i, j], 0.0), name="y")
    return tvm.te.create_prim_func([x, y])


class InterruptAtOnce(NoObserver):
    def stage(self, name):
        if name == "search":
            os.kill(os.getpid(), signal.SIGINT)


def test_without_a_store_nothing_is_kept(tmp_path):
    tune("te:GMM", work_dir=tmp_path, trials=4, seed=1, config=QUICK.replace(store="none"))
    assert not user_store().exists()
    assert not [e for e in read_journal(tmp_path / "journal.jsonl") if e["event"] == "recalled"]


def test_a_store_that_was_named_must_open_before_anything_is_written(tmp_path):
    (tmp_path / "records.db").write_bytes(b"something else" * 1000)
    config = DEFAULT.replace(store=str(tmp_path / "records.db"))
    with pytest.raises(StoreError, match="not a database"):
        tune("te:GMM", work_dir=tmp_path / "run", trials=4, seed=1, config=config)
    assert not (tmp_path / "run").exists()


def test_the_search_ends_when_the_goal_is_reached(tmp_path):
    config = QUICK.replace(store="none")
    report = tune("te:GMM", work_dir=tmp_path, trials=400, until_ms=1e3, seed=1, config=config)
    assert 1 <= report.tasks[0].n_trials <= 8
    assert report.tasks[0].played_off
    assert not report.interrupted
    assert "the goal is reached" in report.stopped


def test_a_network_without_any_choice_is_compiled_without_a_search(tmp_path):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 80), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.nn.softmax(x))
        builder.emit_func_output(y)
    (tmp_path / "net.json").write_text(save_json(builder.get()))
    report = tune(str(tmp_path / "net.json"), work_dir=tmp_path / "run", budget_sec=60, seed=0)
    assert report.tasks == ()
    assert (report.shortfall, report.coverage) == ("", "no function has schedules to choose from")
    assert (tmp_path / "run" / "net.so").is_file()
    applied = apply(str(tmp_path / "run"), out_dir=tmp_path / "deploy")
    assert applied.library.is_file()
