"""The framework's own outputs, and how far they move with their roundings."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tuning.checks.shared import Clock, session_in
from tests.tuning.observers import Notes
from tvm_adaptive.errors import ImportMismatchError
from tvm_adaptive.models import Network
from tvm_adaptive.models.network import Original
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.checks.framework import FrameworkReference


@pytest.mark.parametrize(("apart", "says_little"), [(0.02, False), (0.2, True)])
def test_a_note_says_where_roundings_could_hide_a_wrong_function(
    tmp_path: Path,
    network: Network,
    monkeypatch: pytest.MonkeyPatch,
    apart: float,
    says_little: bool,
) -> None:
    def run(_inputs: Sequence[Any]) -> list[Any]:
        return [np.array([1.0, -4.0], "float32")]

    def run_plainly(inputs: Sequence[Any]) -> list[Any]:
        return [each + np.float32(apart) for each in run(inputs)]

    monkeypatch.setattr(Network, "rounds", True)
    rounding = dataclasses.replace(network, original=Original("Other 1.0", run, run_plainly))
    notes = Notes()
    inputs = [np.zeros(2, "float32")]
    with session_in(tmp_path, Budget(), notes) as session:
        reference = FrameworkReference(session, rounding, inputs, is_here=True)
        reference.run()
        reference.check_import(run(inputs))
    assert any("outputs agree with Other 1.0" in each for each in notes.notes)
    noted = [each for each in notes.notes if "says little" in each]
    assert len(noted) == says_little
    # Three times what two runs of the framework are apart, of its largest value.
    assert all("0.6 is allowed, of values up to 4" in each for each in noted)


@pytest.mark.parametrize(
    ("run_sec", "ends_at", "n_runs"),
    [
        (1.0, None, 3),
        (9.0, None, 2),  # 42 s are left, of which another one would take more than a fifth
        (30.0, None, 1),
        (1.0, 1, 1),  # Ctrl-C
    ],
)
def test_the_runs_that_show_roundings_leave_the_budget_to_the_search(
    tmp_path: Path,
    network: Network,
    monkeypatch: pytest.MonkeyPatch,
    *,
    run_sec: float,
    ends_at: int | None,
    n_runs: int,
) -> None:
    clock, given = Clock(), list[float]()
    budget = Budget(60.0, clock)
    outputs = [np.array([1.0, -4.0], "float32")]

    def run(_inputs: Sequence[Any]) -> list[Any]:
        given.append(clock.now)
        clock.now += run_sec
        if len(given) == ends_at:
            budget.interrupt()
        return outputs

    monkeypatch.setattr(Network, "rounds", True)
    rounding = dataclasses.replace(network, original=Original("Other 1.0", run))
    notes = Notes()
    with session_in(tmp_path, budget, notes) as session:
        reference = FrameworkReference(session, rounding, [np.zeros(2, "float32")], is_here=True)
        reference.run()
        assert reference.expected is outputs
        assert len(reference._spreads) == (n_runs > 1)
    assert len(given) == n_runs
    noted = [each for each in notes.notes if "Other 1.0" in each]
    text = "the budget is short: how far outputs of Other 1.0 move with their roundings is known"
    is_short = n_runs < 3 and ends_at is None
    assert noted == [f"{text} of {n_runs - 1} of 2 runs"] * is_short


def test_a_difference_that_may_be_rounding_ends_no_run(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    def run(_inputs: Sequence[Any]) -> list[Any]:
        clock.now += 30.0
        return [np.array([1.0, -4.0], "float32")]

    rounding = dataclasses.replace(network, original=Original("Other 1.0", run))
    other = [np.array([1.0, -4.5], "float32")]
    for rounds in (True, False):
        monkeypatch.setattr(Network, "rounds", rounds)
        notes, clock.now = Notes(), 0.0
        with session_in(tmp_path / str(rounds), Budget(60.0, clock), notes) as session:
            reference = FrameworkReference(session, rounding, [np.zeros(2)], is_here=True)
            reference.run()
            refused: Any = pytest.raises(ImportMismatchError)
            with contextlib.nullcontext() if rounds else refused:
                reference.check_import(other)
        assert any("may be rounding" in each for each in notes.notes) == rounds
