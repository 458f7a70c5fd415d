from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from benchmarks.micro import calls  # noqa: E402


@pytest.mark.parametrize("kind", calls.KINDS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_graph_has_so_many_functions(kind: str, count: int) -> None:
    model = calls.graph(kind, count)
    onnx.checker.check_model(model)
    assert len(model.graph.node) == max(1, count)
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(model.SerializeToString())
    x = np.ones((1, 64), np.float32)
    (y,) = session.run(None, {"x": x})
    assert y.shape == x.shape
    assert np.array_equal(x, y) == (count == 0)


def test_one_function_more_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tune(_model: Any, path: Path, run: Path, _options: Any) -> None:
        count = int(path.stem.split("-")[1])
        run.mkdir()
        peer = {"name": "ort", "framework": "ONNX Runtime 1", "n_threads": 2}
        peer |= {"secs": [(2 + 3 * count) * 1e-6], "tuned_secs": [(1 + 2 * count) * 1e-6]}
        peer |= {"max_abs": 0.0, "max_rel": 0.0, "agree": True}
        event = {"event": "comparison", "before_sec": 1.0, "after_sec": (1 + 2 * count) * 1e-6}
        event |= {"max_abs": 0.0, "max_rel": 0.0, "agree": True, "peers": [peer]}
        (run / "journal.jsonl").write_text(json.dumps(event) + "\n")

    monkeypatch.setattr(calls, "tune", tune)
    monkeypatch.setattr(
        calls, "secs_from_python", lambda run: [(5 + 2 * int(run.name.split("-")[1])) * 1e-6]
    )
    arguments = [str(tmp_path), "--kinds", "chain", "--counts", "1", "10"]
    calls.main(arguments)
    # All is there.
    monkeypatch.setattr(calls, "tune", None)
    monkeypatch.setattr(calls, "secs_from_python", None)
    calls.main(arguments)
    first, *_ = text = capsys.readouterr().out.splitlines()
    assert first == "| chain, µs | ours | ours, from Python | ONNX Runtime 1 |"
    assert text[-1] == "| *one more* | 2.00 | 2.00 | 3.00 |"
    assert text[-3] == "| 1 | 3.00 | 7.00 | 5.00 |"
