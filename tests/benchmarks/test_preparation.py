from __future__ import annotations

from pathlib import Path

from benchmarks.micro.preparation import STAGES, measure, table
from tvm_adaptive._tvm import relax, save_json


def test_each_step_of_a_model_is_measured(tmp_path: Path) -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.softmax(x, 0))
            z = builder.emit_output(relax.op.nn.softmax(y, 0))
        builder.emit_func_output(z)
    path = tmp_path / "net.json"
    path.write_text(save_json(builder.get()))
    row = measure(str(path))
    assert (row["tasks"], row["calls"]) == (1, 2)
    assert list(row["cpu_sec"]) == list(row["clock_sec"]) == list(STAGES)
    assert min(row["cpu_sec"]["read"], row["cpu_sec"]["extract"]) > 0.0
    *_, last = table([row]).splitlines()
    assert last.startswith("| net.json | 1 | 2 | ")
