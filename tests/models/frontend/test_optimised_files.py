"""Files that ONNX Runtime has optimised and saved, of ONNX's own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest

from tvm_adaptive.models.frontend import load

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


@pytest.mark.parametrize(
    "name",
    [
        "light_squeezenet",
        pytest.param("light_shufflenet", marks=pytest.mark.slow),
        pytest.param("light_inception_v1", marks=pytest.mark.slow),
    ],
)
def test_what_onnx_runtime_has_optimised(name: str, tmp_path: Path, check_import: Any) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "net.onnx")
    options.log_severity_level = 3  # it warns that such a file is for this machine
    onnxruntime.InferenceSession(LIGHT / f"{name}.onnx", options)
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    assert any(each.op_type.startswith("Fused") for each in nodes)
    check_import(load(options.optimized_model_filepath))
