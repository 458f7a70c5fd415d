"""The untuned network, which is compiled beside other work."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from tests.tuning.checks.shared import Clock, die, hang, onnx_network, session_in, tuned
from tests.tuning.observers import Notes
from tvm_adaptive._tvm import (
    memory_database,
)
from tvm_adaptive.errors import (
    InvalidOptionError,
)
from tvm_adaptive.models import Network
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.checks import untuned
from tvm_adaptive.tuning.checks.network import NetworkCheck

# Workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def refuse(*_args: Any, **_options: Any) -> None:
    raise RuntimeError("no such instruction")


def test_the_untuned_network_is_compiled_beside_other_work(
    tmp_path: Path, network: Network
) -> None:
    with session_in(tmp_path, Budget()) as session:
        prepared, _ = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.begin_untuned()
            assert check._before is None
            check.measure_untuned()
            assert check._before is not None
            assert 0.0 < check._compile_sec < check._build_sec
    assert {path.name for path in tmp_path.iterdir()} == {"journal.jsonl"}


@pytest.mark.parametrize("case", ["interrupted", "closed"])
def test_a_run_that_ends_stops_the_compilation_of_the_untuned_network(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(untuned, "export_module", hang)
    budget = Budget()
    with session_in(tmp_path, budget) as session:
        prepared, database = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.begin_untuned()
            if case == "interrupted":
                budget.interrupt()
                check.measure_untuned()
                assert check.measure_tuned(database) is None
        assert check._compiling is not None
        assert check._compiling.result() is None
    assert {path.name for path in tmp_path.iterdir()} == {"journal.jsonl"}


@pytest.mark.parametrize("case", ["refuses", "dies"])
def test_an_untuned_network_that_cannot_be_compiled_ends_the_run(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(untuned, "export_module", refuse if case == "refuses" else die)
    with session_in(tmp_path, Budget()) as session:
        prepared, _ = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.begin_untuned()
            with pytest.raises(InvalidOptionError, match=f"TVM cannot compile {network.name}: "):
                check.measure_untuned()
    assert {path.name for path in tmp_path.iterdir()} == {"journal.jsonl"}


@pytest.mark.parametrize("is_timed", [True, False])
def test_an_untuned_network_whose_latency_is_told_is_compiled_with_optimizations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_timed: bool
) -> None:
    network = onnx_network(tmp_path)
    assert network.original is not None
    if not is_timed:
        original = dataclasses.replace(network.original, run=refuse)
        network = dataclasses.replace(network, original=original)
    with session_in(tmp_path / "run", Budget(1000.0, Clock())) as session:
        prepared, _ = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.begin_untuned()
            first = check._compiling
            assert first is not None
            assert first.is_quick
            check.measure_untuned()
            assert check._compiling is not None
            assert check._compiling.is_quick == is_timed
            assert check._before is not None


def test_without_a_record_the_library_is_compiled_with_optimizations(tmp_path: Path) -> None:
    network = onnx_network(tmp_path)
    observer = Notes()
    with session_in(tmp_path / "run", Budget(1000.0, Clock()), observer) as session:
        prepared, _ = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            before = check._untuned.read_bytes()
            check.measure_tuned(memory_database())
            assert check.library is not None
            assert check.library.read_bytes() != before
    assert check.shortfall == "nothing is tuned; the library is the untuned one"
    # All trials may have failed.
    assert check.shortfall in observer.notes
    assert not any(note.startswith("the budget is short") for note in observer.notes)
