from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.micro import torch_compile


def test_the_table_compares_round_by_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secs = {
        "library": [1e-3, 2e-3, 4e-3],
        "torch.compile": [1.1e-3, 2.2e-3, 4.4e-3],
        "PyTorch": [2.2e-3, 4.4e-3, 4.4e-3],
    }
    row = {"model": "resnet18", "secs": secs, "largest_difference": 2e-6}
    (tmp_path / torch_compile.ROWS_FILE).write_text(json.dumps(row) + "\n")
    assert torch_compile.main([str(tmp_path), "--table"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line == "| resnet18 | 2.00 | 2.20 | 1.10 | 4.40 | 2.00 | 2e-06 |"


@pytest.mark.slow
def test_a_model_of_timm_is_tuned_and_timed(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    arguments = [str(tmp_path), "--models", "mobilenetv3_small_100", "--budget", "40s"]
    assert torch_compile.main([*arguments, "--rounds", "1"]) == 0
    (line,) = (tmp_path / torch_compile.ROWS_FILE).read_text().splitlines()
    assert json.loads(line)["largest_difference"] < 1e-3
