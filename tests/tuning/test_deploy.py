from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest

from benchmarks.loopback_farm import free_port
from tests.database.conftest import make_record
from tests.tuning.observers import Notes
from tests.tuning.runs import QUICK
from tvm_adaptive import tune, tune_tir
from tvm_adaptive._tvm import (
    IRModule,
    Target,
    functions_as_tasks,
    memory_database,
    te_workload,
)
from tvm_adaptive.cli import main
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import InvalidOptionError, OtherModelError, WorkerError
from tvm_adaptive.measure_callback.history import read_history
from tvm_adaptive.measure_callback.journal import read_journal
from tvm_adaptive.models import run_exported
from tvm_adaptive.models.content import MODEL_ASSUMED
from tvm_adaptive.report import read_run
from tvm_adaptive.tuning import deploy
from tvm_adaptive.tuning import manifest as manifest_module
from tvm_adaptive.tuning import target as target_module
from tvm_adaptive.tuning.checks import network as network_check
from tvm_adaptive.tuning.checks.network import NetworkCheck
from tvm_adaptive.tuning.config import DEFAULT, MeasureConfig
from tvm_adaptive.tuning.deploy import APPLY_FILE, apply
from tvm_adaptive.tuning.finals.finalists import Finalists
from tvm_adaptive.tuning.manifest import MANIFEST_FILE
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.values.forms import DIRECT, FormKey
from tvm_adaptive.values.run_folder import RECORD_FILE

# Workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("brief_timings")

LIBRARY = "perceptron-make.so"
FACTORY = """
import numpy as np
from tvm.relax.frontend import nn

from tvm_adaptive.models.network import network_of_nn

class Perceptron(nn.Module):
    def __init__(self):
        self.inner, self.outer = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, embedded):
        return self.outer(nn.op.relu(self.inner(embedded)))

def draw(rng, name, shape):
    return rng.standard_normal(shape).astype(np.float32)

def make():
    return network_of_nn("net", Perceptron(), {"embedded": (1, 16, 32)}, draw, seed=0)
"""


@pytest.fixture(scope="module")
def run(brief_timings, tmp_path_factory):
    """A network of the user's own, tuned a little."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "perceptron.py").write_text(FACTORY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        tune("perceptron:make", work_dir="run", trials=8, seed=1, config=QUICK)
    yield folder
    sys.modules.pop("perceptron", None)


@pytest.fixture(scope="module")
def applied(run, tmp_path_factory):
    """The folder of the run's library, and what the command has printed."""
    folder, printed = tmp_path_factory.mktemp("applied") / "out", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(run)
        assert main(["apply", "run", "--out", str(folder)]) == 0
    return folder, printed.getvalue()


@pytest.fixture
def out(applied, tmp_path):
    """A copy of that folder."""
    folder, _ = applied
    return Path(shutil.copytree(folder, tmp_path / "out"))


def run_example(path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python example as a user would, from elsewhere and without this package."""
    command = [sys.executable, "-c", f"import runpy; runpy.run_path({str(path)!r})"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def example_says(path: Path, folder: Path) -> str:
    result = run_example(path, folder)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_run_becomes_a_library_with_examples(applied, out, tmp_path):
    _, printed = applied
    assert "agree; largest difference" in printed
    assert "functions tuned" in printed
    # Of so small a network the untuned functions may be as fast.
    assert re.search(r"\d x (faster|slower)", printed)
    check_manifest(json.loads((out / MANIFEST_FILE).read_text()))
    assert example_says(out / "example.py", tmp_path).startswith("(1, 16, 32) float32")
    check_refusal(out)


def check_refusal(out: Path) -> None:
    """Run the example where the processor lacks something."""
    manifest = json.loads((out / MANIFEST_FILE).read_text())
    manifest["cpu_features"]["avx1024"] = "avx1024f"
    manifest["cpu_features"]["avx2048"] = ""  # Linux would not list it
    (out / MANIFEST_FILE).write_text(json.dumps(manifest))
    result = run_example(out / "example.py", out)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line == f"{LIBRARY} cannot run on this processor, which lacks avx1024"


def check_manifest(manifest: dict[str, Any]) -> None:
    assert manifest["library"] == LIBRARY
    tensor = {"shape": [1, 16, 32], "dtype": "float32"}
    assert manifest["inputs"] == [{"name": "embedded", **tensor}]
    assert manifest["outputs"] == [{"name": "output_0", **tensor}]
    assert manifest["buffers"] == []
    assert manifest["comparison"]["agree"] is True
    assert manifest["latency_sec"] == manifest["comparison"]["after_sec"] > 0
    functions = manifest["functions"]
    n_functions = len(functions["tuned"]) + len(functions["fallback"])
    assert manifest["coverage"].startswith(f"{len(functions['tuned'])} of {n_functions} functions")
    n_cores = manifest["target_config"]["num-cores"]
    secs = {int(count): sec for count, sec in manifest["latency_sec_by_threads"].items()}
    assert (n_cores in secs) == (n_cores // 2 in secs) == (n_cores > 1)
    assert manifest["n_threads"] == min(secs, key=secs.__getitem__, default=n_cores)
    assert manifest["mcpu"] == manifest["target_config"]["mcpu"]
    versions = [manifest[name] for name in ("tvm", "tvm_ffi", "tvm_adaptive")]
    names = ("apache-tvm", "apache-tvm-ffi", "tvm-adaptive")
    assert versions == [metadata.version(name) for name in names]


def test_the_journal_bounds_each_task_by_what_the_processor_reaches(run):
    history = read_run(run / "run")
    assert history.tasks
    limits_ms = [history.limit_ms(task) for task in history.tasks.values()]
    assert all(0 < limit_ms < 1 for limit_ms in limits_ms), (limits_ms, history.roofline)


def test_what_was_applied_is_not_taken_for_a_run(out, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {path.relative_to(out).as_posix() for path in before} >= {
        *(APPLY_FILE, MANIFEST_FILE, LIBRARY, "example.py")
    }
    events = [event["event"] for event in read_journal(out / APPLY_FILE)]
    assert events[:2] == ["journal", "apply"]
    assert events[-1] == "end"
    assert {"run", "model", "tasks", "report"}.isdisjoint(events)
    assert not read_history(out / APPLY_FILE).run
    for command in (["show"], ["report"], ["apply"], ["tune", "--resume"], ["db", "import"]):
        assert main([*command, str(out)]) == 2
        assert "Traceback" not in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_record_that_was_half_written_is_checked_anew(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run)
    shutil.copytree(run / "run", tmp_path / "run")
    path = tmp_path / "run" / "final" / RECORD_FILE
    torn = path.read_text().rstrip()[:-20]
    path.write_text(torn)
    applied = apply(tmp_path / "run", out_dir=tmp_path / "out")
    assert applied.comparison.agree
    assert not applied.coverage.startswith("0 of")
    assert path.read_text() == torn


def test_play_offs_find_the_device_of_a_farm_free(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run)
    steps = []

    def note(owner, name, *, then=None):
        monkeypatch.setattr(owner, name, lambda *_, **__: steps.append(name) or then)

    note(NetworkCheck, "measure_untuned")
    note(NetworkCheck, "release_device")
    note(deploy, "checked_database", then=memory_database())
    with pytest.raises(InvalidOptionError, match="passed its check"):
        apply("run", out_dir=tmp_path)
    assert steps == ["measure_untuned", "release_device", "checked_database"]


def test_another_farm_changes_nothing_else_of_a_run():
    ours = MeasureConfig(tracker="a:1", tracker_key="board", timeout_sec=60.0)
    other = DEFAULT.replace(runner="adaptive-rpc", measure=MeasureConfig(tracker="b:2"))
    found = deploy._with_other_farm(DEFAULT.replace(measure=ours), other)
    assert found.runner == "adaptive-rpc"
    assert found.measure == MeasureConfig(tracker="b:2", tracker_key="board", timeout_sec=60.0)
    assert deploy._with_other_farm(DEFAULT, DEFAULT.replace(measure=ours)) == DEFAULT


@pytest.mark.parametrize(
    ("proven", "share"),
    [
        (("other", "conv"), 1.0),
        (("other", "input", "product"), 1.0),
        (("other", "input"), 2 / 3),  # half a form is none
        (("other",), 2 / 3),
        ((), 0.0),
    ],
)
def test_calls_count_in_the_form_that_is_used(proven, share):
    weights = {"other": 2, "conv": 1, "input": 1, "product": 1}
    forms = {
        "conv": FormKey("conv", DIRECT),
        "input": FormKey("conv", "winograd"),
        "product": FormKey("conv", "winograd"),
    }
    tasks = [SimpleNamespace(weight=weight) for weight in weights.values()]
    finalists = [
        Finalists(None, name, (object(),), 1.0, proven=object())
        if name in proven
        else Finalists(None, name, (), 0.0)
        for name in weights
    ]
    found = deploy._proven_share(tasks, finalists, forms, is_direct=False)
    assert found == pytest.approx(share)


def test_a_model_is_read_by_the_server_that_forks_the_other_workers(tmp_path, monkeypatch):
    servers = []

    def load(*_arguments, reader, **_options):
        servers.append(reader._pool._owns_server)
        raise InvalidOptionError("no model")

    monkeypatch.setattr(deploy, "load", load)
    with pytest.raises(InvalidOptionError, match="no model"):
        apply("net.onnx", out_dir=tmp_path / "out")
    assert servers == [False]


def test_a_farm_that_is_not_there_costs_the_comparison(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tvm_adaptive.runner.rpc.leased_worker.SERVER_WAIT_SEC", 0.0)
    monkeypatch.chdir(run)
    farm = ["--tracker", f"127.0.0.1:{free_port()}", "--tracker-key", "board"]
    for _ in range(2):  # the second one finds the first one's library
        assert main(["apply", "run", "--out", str(tmp_path), *farm]) == 1
        reported = capsys.readouterr()
        assert "no device could be leased" in reported.err
        assert "functions tuned" in reported.out
    assert json.loads((tmp_path / MANIFEST_FILE).read_text())["comparison"] is None
    # What it was built from is there, and whoever has a linker can use it.
    assert not list(tmp_path.glob("libtvm*"))  # its devices may have another processor
    (scores,) = run_exported(tmp_path / "perceptron-make.tar", [np.zeros((1, 16, 32), "float32")])
    assert scores.shape == (1, 16, 32)


@pytest.mark.slow
def test_the_store_will_do_instead_of_a_run(tmp_path):
    store = str(tmp_path / "records.db")
    tune("te:GMM", work_dir=tmp_path / "run", trials=8, seed=1, config=QUICK.replace(store=store))
    shutil.rmtree(tmp_path / "run")
    applied = apply("te:GMM", out_dir=tmp_path / "out", config=QUICK.replace(store=store))
    assert applied.coverage == "1 of 1 functions tuned"
    assert applied.comparison.agree
    assert applied.library.is_file()
    manifest = json.loads(applied.manifest.read_text())
    assert [each["shape"] for each in manifest["buffers"]] == 3 * [[1, 128, 128]]
    assert manifest["functions"]["tuned"] == {"main": 1}
    assert [path.name for path in applied.examples] == ["example.py"]
    assert "(1, 128, 128)" in example_says(applied.examples[0], tmp_path)


@pytest.mark.parametrize(
    ("what", "options", "text"),
    [
        ("te:GMM", {}, "Nothing was recorded for te:GMM on llvm"),
        ("te:GMM", {"config": QUICK}, "Say where the records are"),
        ("resnet19", {}, "workload must be one of"),
    ],
)
def test_without_records_nothing_is_applied(what, options, text, tmp_path):
    with pytest.raises(InvalidOptionError, match=text):
        apply(what, out_dir=tmp_path / "out", **options)


def test_what_was_given_in_python_is_applied_in_python(tmp_path):
    mod = IRModule({"main": te_workload("GMM")["main"]})
    tune_tir(mod, work_dir=tmp_path / "run", trials=4, seed=1, config=QUICK)
    with pytest.raises(InvalidOptionError, match="was given its model in Python"):
        apply(str(tmp_path / "run"), out_dir=tmp_path / "out")


def test_another_model_of_the_same_name_is_not_applied(run, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    (other / "perceptron.py").write_text(FACTORY.replace("Linear(64, 32)", "Linear(64, 16)"))
    monkeypatch.chdir(other)
    monkeypatch.delitem(sys.modules, "perceptron", raising=False)
    with pytest.raises(OtherModelError, match=r"its operators, shapes or types changed. Apply the"):
        apply(run / "run", out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    sys.modules.pop("perceptron")


def test_a_run_of_an_unknown_model_is_applied_with_a_note(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run)
    shutil.copytree("run", tmp_path / "run")
    journal = tmp_path / "run" / "journal.jsonl"
    journal.write_text(re.sub('"content":"[^"]*"', '"content":""', journal.read_text()))
    observer = Notes()

    def stop(*_arguments, **_options):
        raise InvalidOptionError("this much is enough")

    monkeypatch.setattr(deploy, "_compiled", stop)
    with pytest.raises(InvalidOptionError, match="this much is enough"):
        apply(tmp_path / "run", out_dir=tmp_path / "out", observer=observer)
    assert MODEL_ASSUMED in observer.notes


@pytest.mark.parametrize(
    "name", ["CMakeLists.txt", "manifest.json", "example.c", "example.py", "main.so"]
)
def test_files_of_other_programs_are_not_replaced(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(InvalidOptionError, match=f"{name} would be replaced"):
        apply("te:GMM", out_dir=tmp_path, config=QUICK)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_what_this_processor_lacks_is_needed_though_nothing_has_run_here(monkeypatch):
    for module in (manifest_module, target_module):
        monkeypatch.setattr(module, "processor_flags", lambda: frozenset({"avx", "avx2", "fma"}))
    fields = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "num-cores": 1}
    for mcpu, is_needed in (("skylake-avx512", True), ("haswell", False)):
        context = SimpleNamespace(farm=None, target=Target({**fields, "mcpu": mcpu}))
        found = manifest_module.features_of(context)
        assert ("avx512f" in found) == is_needed
        assert "avx2" in found


def test_another_architecture_is_refused_where_this_machine_would_link(tmp_path):
    name = "x86_64" if platform.machine() in ("aarch64", "arm64") else "aarch64"
    target = {"kind": "llvm", "mtriple": f"{name}-linux-gnu", "num-cores": 2}
    with pytest.raises(InvalidOptionError, match=f"is for {name}, but this machine is"):
        apply("te:GMM", out_dir=tmp_path / "out", target=target, config=QUICK)
    assert not (tmp_path / "out").exists()


def test_a_run_is_not_applied_over_a_run(run, capsys):
    before = sorted((path, path.stat().st_mtime_ns) for path in (run / "run").rglob("*"))
    assert main(["apply", str(run / "run"), "--out", str(run / "run")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "is a run's directory" in line
    assert "--out" in line
    assert sorted((path, path.stat().st_mtime_ns) for path in (run / "run").rglob("*")) == before


def test_what_a_store_has_recorded_only_is_checked_first(tmp_path):
    """Nobody has held a play-off for what MetaSchedule, or a killed run, has put there."""
    target = resolve_target("cpu")
    (task,) = functions_as_tasks(te_workload("GMM"), target)
    mod, path = task.dispatched[0], str(tmp_path / "records.db")
    with RecordStore(path) as store:
        records = [
            make_record(mod, target, seconds, seed) for seed, seconds in ((1, 1e-3), (2, 2e-3))
        ]
        store.add(task_of(mod, target, "main"), [trial_of(record) for record in records])
    applied = apply("te:GMM", out_dir=tmp_path / "out", config=QUICK.replace(store=path))
    assert applied.coverage == "1 of 1 functions tuned"
    assert applied.comparison.agree
    events = read_journal(tmp_path / "out" / APPLY_FILE)
    (held,) = [event for event in events if event["event"] == "playoff"]
    (winner,) = held["candidates"]
    assert (winner["unchecked"], winner["disqualified"]) == ("", "")


def test_a_library_stays_where_no_later_record_passes(run, out, monkeypatch):
    before = (out / LIBRARY).read_bytes()
    monkeypatch.setattr(deploy, "checked_database", lambda *_: memory_database())
    with pytest.raises(InvalidOptionError, match="passed its check"):
        apply(str(run / "run"), out_dir=out)
    assert (out / LIBRARY).read_bytes() == before


def test_a_deployed_library_stays_where_a_later_one_fails(run, out, monkeypatch):
    paths = [out / LIBRARY, out / MANIFEST_FILE, *out.glob("example.*")]
    before = {path: path.read_bytes() for path in paths}
    assert out / "example.py" in before
    faults = {
        "SIGABRT": (network_check, "run_exported", crash),
        "output 0 is wrong": (NetworkCheck, "_problem", lambda *_: "output 0 is wrong"),
    }
    for text, fault in faults.items():
        with monkeypatch.context() as patch:
            patch.setattr(*fault)
            with pytest.raises(WorkerError, match=f"cannot be deployed: .*{text}"):
                apply(str(run / "run"), out_dir=out)
        assert {path: path.read_bytes() for path in paths} == before
    assert apply(str(run / "run"), out_dir=out).comparison is not None


def crash(*_arguments):
    os.abort()


def test_a_run_has_its_own_target(run, tmp_path):
    with pytest.raises(InvalidOptionError, match="are those of the run"):
        apply(str(run / "run"), out_dir=tmp_path, target="cpu")
    for change in ({"layout": "keep"}, {"forms": False}):
        with pytest.raises(
            InvalidOptionError, match=f"those of the run.* omit {next(iter(change))}"
        ):
            apply(str(run / "run"), out_dir=tmp_path, config=DEFAULT.replace(**change))
