"""The zoo: rows of models that pass, fail, or end their process."""

from __future__ import annotations

import os
import signal
import time

import pytest

from benchmarks.zoo import models, stages
from benchmarks.zoo.catalog import EXPORTS, FILE, MODELS, Model


def row(model, export, agrees, **more):
    return {"model": model, "export": export, "agrees": agrees, "stage": "compare", **more}


def test_the_table_counts_files_that_the_framework_runs():
    key = "torchvision/resnet18"
    rows = [
        row(key, "dynamo", True, max_error=2e-6, size=0.5, version="torchvision 0.28.0"),
        row(key, "script", False, message="TVM cannot import it: Foo | Bar", stage="import"),
        row(key, "program", False, message="no", stage="framework", framework_runs=False),
        row(key, "program-open", False, message="GuardError", stage="export"),
    ]
    text = models.table(rows)
    assert f"1 of {len(MODELS)} models were run, in 2 files" in text
    assert "1 files are imported and agree," in text
    assert "| agrees | fails: import | framework fails |  |  | no export | 4e-06 |" in text
    assert "0 of them weakly" in text
    rows[0]["size"] = 1e-6
    assert "| weak | fails: import |" in models.table(rows)
    assert "script: TVM cannot import it: Foo / Bar" in text
    rows[1]["message"] = "SerializeError: [target=math.ceil](args = (%x,))"
    assert r"[target=math.ceil]\(args = (%x,))" in models.table(rows)  # no link


def test_what_is_in_the_file_is_not_run_again(tmp_path, monkeypatch, capsys):
    ran = []

    def run(model, export):
        ran.append((model.key, export))
        agrees = export != "script"
        return {"agrees": agrees, "size": 1.0, "stage": "compare", "message": ""}

    monkeypatch.setattr(models, "run", run)
    path = str(tmp_path / "rows.jsonl")
    names = ["onnx/light_squeezenet", "timm/lcnet_050"]
    expected = [(names[0], FILE), *((names[1], export) for export in EXPORTS)]
    models.main([path, *names])
    assert sorted(ran) == sorted(expected)
    models.main([path, *names])
    assert len(ran) == len(expected)
    models.main([path, *names, "--again"])
    assert ran[len(expected) :] == [(names[1], "script")]
    assert "lcnet_050 script: fails" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_is_imported_compiled_and_compared():
    pytest.importorskip("onnxruntime")
    (model,) = (each for each in MODELS if each.name == "light_squeezenet")
    found = models.run(model, FILE)
    assert found["agrees"], found
    assert found["stage"] == "compare"
    assert found["version"].startswith("onnx ")


def test_a_package_that_is_missing_is_named():
    row = stages.take(Model("no_such_package", "x", file="x.onnx"), FILE, print)
    assert "no_such_package" in row["message"]
    assert "version" not in row


def crash(_model, _export, tell):
    tell("compile")
    os.kill(os.getpid(), signal.SIGKILL)


def hang(_model, _export, tell):
    tell("prepare")
    time.sleep(60)


@pytest.mark.parametrize(
    ("take", "stage", "why"), [(crash, "compile", "ended with -9"), (hang, "prepare", "more than")]
)
def test_a_crash_or_a_hang_is_a_row(take, stage, why, monkeypatch):
    monkeypatch.setattr(models, "take", take)
    monkeypatch.setattr(models, "LIMIT_SEC", 1.0)
    found = models.run(MODELS[0], FILE)
    assert (found["stage"], found["agrees"], found["framework_runs"]) == (stage, False, True)
    assert why in found["message"]
