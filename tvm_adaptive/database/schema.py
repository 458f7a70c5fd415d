"""The tables of a record store.

============  ========================================================================
table         a row is
============  ========================================================================
meta          one fact of the store itself: its format version
tasks         a workload on a target, with what other tasks recognise it by
environments  a device with versions of TVM and of this package
trials        one measured candidate of a task, failed ones included
finals        what a play-off said of one candidate of a task
============  ========================================================================

Older formats are brought to this one by :mod:`tvm_adaptive.database.upgrade`.
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

FORMAT_VERSION = 2

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

environments = Table(
    "tvm_adaptive_environments",
    metadata,
    Column("id", Integer, primary_key=True),
    # The texts together are too long for an index everywhere.
    Column("key", String(64), nullable=False, unique=True),
    Column("device", Text, nullable=False),
    Column("tvm", Text, nullable=False),
    Column("tvm_ffi", Text, nullable=False),
    Column("tvm_adaptive", Text, nullable=False),
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
    # Text: for imported records it is a folder's path.
    Column("run", Text, nullable=False),
    # NULL where nobody said where it was measured.
    Column("environment_id", ForeignKey(environments.c.id)),
)
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
    Column("run", Text, nullable=False),
    Column("environment_id", ForeignKey(environments.c.id)),
)
Index("tvm_adaptive_trials_by_time", trials.c.task_id, trials.c.seconds)
