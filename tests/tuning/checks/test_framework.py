"""The framework's own outputs, and how far they move with their roundings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tuning.checks.shared import session_in
from tests.tuning.observers import Notes
from tvm_adaptive.models import Network
from tvm_adaptive.models.network import Original
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.checks.framework import FrameworkReference


@pytest.mark.parametrize(("apart", "says_little"), [(0.02, False), (0.2, True)])
def test_the_user_is_told_where_roundings_could_hide_a_wrong_function(
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
    told = [each for each in notes.notes if "says little" in each]
    assert len(told) == says_little
    # Three times what two runs of the framework are apart, of its largest value.
    assert all("0.6 is allowed, of values up to 4" in each for each in told)
