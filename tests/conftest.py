from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (missing := missing_for_gpu()):
        pytest.skip(f"needs an NVIDIA GPU and nvcc; missing: {missing}")


def missing_for_gpu() -> str:
    if shutil.which("nvcc") is None:
        return "nvcc on PATH"
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi on PATH"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return "" if listed.stdout.startswith("GPU") else "a GPU in nvidia-smi -L"
