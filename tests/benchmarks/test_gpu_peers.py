from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers import gpu

KEPT = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu"


def test_the_kept_figures_are_those_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--show", str(KEPT / "peers-480s.json")]) == 0
    printed = capsys.readouterr().out
    assert "H100" in printed
    assert (
        "| resnet18 | 779.12 | 1282.53 (1.65 x) | 1726.59 (2.22 x) | 441.79 (0.57 x) |" in printed
    )


def test_ratios_are_of_medians_to_ours() -> None:
    secs = {"ours": [2e-6, 1e-6, 9e-6], "PyTorch, float32": [3e-6, 3e-6, 1e-6]}
    printed = gpu.table([{"workload": "te:GMM", "secs": secs}])
    assert "| te:GMM | 2.00 | 3.00 (1.50 x) |" in printed


def test_an_unknown_workload_is_named() -> None:
    with pytest.raises(ValueError, match="te:GMM, te:C2D or resnet18 but got 'te:SFM'"):
        gpu.torch_call("te:SFM", None)
