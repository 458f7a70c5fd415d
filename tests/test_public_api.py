from __future__ import annotations

import importlib

import pytest

import tvm_adaptive

PUBLIC = {
    "AdaptiveRPCRunner",
    "AdaptiveRunner",
    "AdaptiveScheduler",
    "AdaptiveSearch",
    "PersistentBuilder",
    "RFEICostModel",
    "TuneConfig",
    "__version__",
    "compile",
    "register",
    "tune",
    "tune_relax",
    "tune_tir",
    "unregister",
}
# More than a reader can hold at once needs sub-packages instead.
MAX_NAMES = 14


def test_the_public_names_are_these() -> None:
    assert set(tvm_adaptive.__all__) == PUBLIC
    assert len(tvm_adaptive.__all__) <= MAX_NAMES


def test_every_public_name_is_there_and_documented() -> None:
    for name in tvm_adaptive.__all__:
        value = getattr(tvm_adaptive, name)
        assert isinstance(value, str) or value.__doc__, f"{name} has no docstring"


def test_the_names_are_listed_for_completion() -> None:
    assert set(dir(tvm_adaptive)) >= PUBLIC


@pytest.mark.parametrize(
    "package", ["IPython", "onnx", "onnxruntime", "onnxscript", "plotly", "psycopg"]
)
def test_what_the_extra_test_installs_can_be_imported(package: str) -> None:
    """Else most tests of models and reports would be skipped, and nobody would notice."""
    importlib.import_module(package)
