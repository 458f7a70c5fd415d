"""Whatever a command is given: one clear line, exit code 2, and nothing lost."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tvm_adaptive.cli import main

ONE_TRIAL = ["--trials", "1", "--store", "none"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with things that are not what a command wants."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "blocked" / "journal.jsonl").mkdir(parents=True)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "journal.jsonl").write_text('{"event":"journal"}\nx\n{"event":"a"}\n')
    (tmp_path / "begun").mkdir()
    (tmp_path / "waiting").mkdir()
    begun = '{"event":"journal","version":1}\n{"event":"run","trials":1}\n'
    (tmp_path / "waiting" / "journal.jsonl").write_text(begun)
    (tmp_path / "begun" / "journal.jsonl").write_text('{"event":"journal","version":1}\n')
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "journal.jsonl").write_text('{"event":"journal","version":99}\n')
    (tmp_path / "net.onnx").write_bytes(b"\x08\x07not a model")
    (tmp_path / "net.pt2").write_bytes(b"PK\x03\x04 no zip")
    (tmp_path / "net.json").write_text('{"root_index": 0}')
    (tmp_path / "options.toml").write_text("cost_model = 7")
    (tmp_path / "store.db").write_text("no database, but as long as one " * 20)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["tune", "te:GMM", *ONE_TRIAL, "--work-dir", "file/run"], "work directory"),
        (["tune", "te:GMM", *ONE_TRIAL, "--work-dir", "blocked"], "cannot be written"),
        (["tune", "te:GMM", "--trials", "1", "--store", "store.db"], "store.db"),
        (["tune", "te:GMM", *ONE_TRIAL, "--seed", "-1"], "seed must be at least 0"),
        (["tune", "te:GMM", *ONE_TRIAL, "--config", "options.toml"], "cost_model must be str"),
        (["tune", "te:GMM", *ONE_TRIAL, "--input-shape", "1x2"], "leave input shapes out"),
        (["tune", "net.onnx", *ONE_TRIAL], "net.onnx is no ONNX model"),
        (["tune", "net.json", *ONE_TRIAL], "net.json is no module"),
        (["tune", "net.onnx", *ONE_TRIAL, "--peers", "ort,tflite"], "Unknown peer 'tflite'"),
        (["tune", "nothing.onnx", *ONE_TRIAL], "nothing.onnx cannot be read"),
        (["tune", "empty", *ONE_TRIAL], "A model of your own is a file"),
        (["tune", "no.such:factory", *ONE_TRIAL], "cannot be imported"),
        (["tune", "--resume", "damaged"], "line 2 is not valid JSON"),
        (["tune", "--resume", "begun"], "no run in begun"),
        (["tune", "--resume", "newer"], "format version 99"),
        (["apply", "damaged", "--out", "out"], "line 2 is not valid JSON"),
        (["apply", "begun", "--out", "out"], "no run in begun"),
        (["apply", "empty", "--out", "out"], "no run in empty"),
        (["apply", "runs/mien", "--out", "out"], "no run in runs/mien"),
        (["apply", "resnet19", "--out", "out"], "workload must be one of"),
        (["tune", "net.pth", *ONE_TRIAL, "--input-shape", "1x2"], "A model of your own is a file"),
        (["apply", "begun", "--config", "c.toml", "--out", "out"], "omit --config"),
        (["apply", "te:GMM", "--store", "store.db", "--out", "out"], "store.db"),
        (["apply", "te:GMM", "--store", "none", "--out", "file"], "cannot be made"),
        (["report", "empty"], "is no run's directory"),
        (["report", "damaged"], "line 2 is not valid JSON"),
        (["report", "begun", "--out", "file/report.html"], "cannot be written"),
        (["show", "begun"], "no run in begun"),
        (["show", "waiting"], "continue it with tvm-adaptive tune --resume waiting"),
        (["show", "damaged"], "line 2"),
        (["db", "--store", "store.db", "stats"], "store.db"),
        (["db", "import", "empty"], "empty"),
        (["db", "import", "store.db"], "store.db"),
        (["db", "--store", "", "import", "run"], "There is no folder or record store run"),
        (["db", "--store", "", "stats"], "has an empty name"),
        (["tune", "te:GMM", "--trials", "1", "--store", ""], "has an empty name"),
        (["db", "--store", "env:NO_SUCH_VARIABLE", "stats"], "which is not set"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_one_clear_line(
    arguments: list[str], text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(folder)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("tvm-adaptive: error")]
    assert text in line
    assert "Traceback" not in captured.err
    assert contents(folder).items() >= before.items()


def test_the_place_of_an_error_in_a_models_code_is_shown_on_request(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "wrong.py").write_text("def make():\n    return None.shape\n")
    with caplog.at_level(logging.INFO):
        assert main(["tune", "wrong:make", *ONE_TRIAL, "-v"]) == 2
    assert "in make" in caplog.text


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_truncated_program_of_pytorch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["tune", "net.pt2", *ONE_TRIAL]) == 2
    assert "net.pt2 is no program of torch.export.save" in capsys.readouterr().err
