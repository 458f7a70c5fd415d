"""A cost model as it is now, for a search that runs in another process."""

from __future__ import annotations

import pickle
from typing import Any

from tvm_adaptive._tvm import TuneContext
from tvm_adaptive.cost_model.model import RFEICostModel


def snapshot_of(model: Any, context: TuneContext) -> bytes:
    """Return what another process of this run needs to score a task's candidates."""
    model.refit(context)
    return pickle.dumps(model._surrogate.frozen())


def install(model: RFEICostModel, snapshot: bytes) -> None:
    """Let a model answer as the one that a snapshot was taken of."""
    model._inst._surrogate = pickle.loads(snapshot)
