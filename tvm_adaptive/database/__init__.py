"""Records that outlive a run."""

from __future__ import annotations

from tvm_adaptive.database.metaschedule import StoreDatabase
from tvm_adaptive.database.run_database import RunDatabase
from tvm_adaptive.database.store import RecordStore

__all__ = ["RecordStore", "RunDatabase", "StoreDatabase"]
