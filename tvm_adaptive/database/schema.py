"""The tables of a record store.

========  ============================================================================
table     a row is
========  ============================================================================
meta      one fact of the store itself: its format version
tasks     a workload on a target, with what other tasks recognise it by
trials    one measured candidate of a task, failed ones included
finals    what a play-off said of one candidate of a task
========  ============================================================================
"""

from __future__ import annotations

from sqlalchemy import (
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

FORMAT_VERSION = 1

metadata = MetaData()

# Prefixed: a team's database may hold other tables.
meta = Table(
    "tvm_adaptive_meta",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

tasks = Table(
    "tvm_adaptive_tasks",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("workload_key", String(32), nullable=False),
    Column("target", Text, nullable=False),
    # Two targets differ by their JSON, which is too long for an index everywhere.
    Column("target_key", String(64), nullable=False),
    Column("family", String(256), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("workload", Text, nullable=False),
    UniqueConstraint("workload_key", "target_key"),
)

trials = Table(
    "tvm_adaptive_trials",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("task_id", ForeignKey(tasks.c.id, ondelete="CASCADE"), nullable=False),
    Column("record", Text, nullable=False),
    Column("seconds", Float),
    Column("error", Float),
    Column("failure", Text, nullable=False),
    Column("features", LargeBinary),
    Column("unix_sec", Float, nullable=False),
    Column("run", String(64), nullable=False),
)
# Added to a store that has none: who does not know of it can use the store nevertheless.
finals = Table(
    "tvm_adaptive_finals",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("task_id", ForeignKey(tasks.c.id, ondelete="CASCADE"), nullable=False, index=True),
    Column("record", Text, nullable=False),
    Column("seconds", Float),
    Column("error", Float),
    Column("failure", Text, nullable=False),
    Column("unix_sec", Float, nullable=False),
    Column("run", String(64), nullable=False),
)
Index("tvm_adaptive_trials_by_time", trials.c.task_id, trials.c.seconds)
