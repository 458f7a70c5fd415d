from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.micro import copies
from benchmarks.micro.copies import main, row_of_file, transposes_of
from benchmarks.rows import read_rows
from tvm_adaptive._tvm import IRModule, relax, save_json


def network() -> IRModule:
    """Return a model whose output is a transpose beside the input: neither can be avoided."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    y = relax.Var("y", relax.TensorType((8, 4), "float32"))
    with builder.function("main", [x, y]):
        with builder.dataflow():
            moved = builder.emit(relax.op.permute_dims(x, [1, 0]))
            both = builder.emit(relax.op.concat([moved, y], 1))
            soft = builder.emit(relax.op.nn.softmax(both, 1))
            z = builder.emit_output(relax.op.permute_dims(soft, [1, 0]))
        builder.emit_func_output(z)
    return builder.get()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "net.json"
    path.write_text(save_json(network()))
    return path


def test_what_only_moves_data_is_counted(path: Path) -> None:
    assert transposes_of(network()) == 2
    row = row_of_file(path, {})
    assert row["imported"] == 2
    left = row["left"]
    assert left["transpose"] >= 1  # of the output
    assert sum(left.values()) == row["calls"] - 1  # all but the softmax
    assert 0.0 < row["share"] < 1.0
    assert any(" x " in text for text in row["most"])


def test_a_model_whose_package_is_missing_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_folder: Path) -> Path:
        raise ModuleNotFoundError("No module named 'timm'")

    broken, good = (SimpleNamespace(name=name, file=write, shapes={}) for name in "ab")
    good.file = lambda folder: folder
    monkeypatch.setattr(copies, "PEERS", [broken, good])
    monkeypatch.setattr(copies, "ZOO", [])
    monkeypatch.setattr(copies, "row_of_file", lambda *_: {"n": 1})
    assert dict(copies.new_rows((), tmp_path, {})) == {
        "a": {"error": "No module named 'timm'"},
        "b": {"n": 1},
    }


def test_a_model_is_prepared_once_and_an_error_is_a_row(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    out = tmp_path / "out"
    assert main([str(out), "--models", str(path), str(broken)]) == 0
    rows = read_rows(out / copies.ROWS_FILE, "model")
    assert set(rows) == {str(path), str(broken)}
    assert rows[str(broken)]["error"]
    monkeypatch.setattr(copies, "row_of_file", None)
    assert main([str(out), "--models", str(path), str(broken)]) == 0
    *_, good, bad = capsys.readouterr().out.splitlines()
    assert good.startswith(f"| {path} | 2 | ")
    assert bad.startswith(f"| {broken} |  |")
