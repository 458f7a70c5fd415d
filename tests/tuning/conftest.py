from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tuning.observers import NoObserver
from tvm_adaptive._tvm import Target
from tvm_adaptive.measure_callback.journal import NullJournal
from tvm_adaptive.models import Network, transformer
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.config import DEFAULT, TuneConfig
from tvm_adaptive.tuning.session import RunOptions, Session


@pytest.fixture
def make_session(tmp_path: Path) -> Any:
    """Return a function that makes a session without journal, locks and processes."""

    def make(config: TuneConfig = DEFAULT, **fields: Any) -> Session:
        options = RunOptions(
            what="net",
            work_dir=tmp_path,
            trials=1,
            seed=0,
            config=config,
        )
        given: dict[str, Any] = {
            "journal": NullJournal(),
            "observer": NoObserver(),
            "target": Target({"kind": "llvm", "num-cores": 2}),
            "work_dir": tmp_path,
            "seed": 0,
            "budget": Budget(),
            **fields,
        }
        return Session(config=config, options=options, **given)

    return make


@pytest.fixture(scope="module")
def network() -> Network:
    return transformer(sequence=16, layers=1, hidden=32, heads=4, inner=64)
