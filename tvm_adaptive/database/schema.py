"""The tables of a record store; :mod:`tvm_adaptive.database.upgrade` upgrades older ones."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Column, Float, ForeignKey, Integer, String, Table, Text

FORMAT_VERSION = 2

metadata = sa.MetaData()

# The prefix of the names keeps them apart from other tables of a team's database.

# A row is one fact about the store itself: its format version.
meta = Table(
    "tvm_adaptive_meta",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

# A workload on a target, with what related tasks have in common.
tasks = Table(
    "tvm_adaptive_tasks",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("workload_key", String(32), nullable=False),
    Column("target", Text, nullable=False),
    # Digest: a target's JSON is too long for an index on some databases.
    Column("target_key", String(64), nullable=False),
    Column("family", String(256), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("workload", Text, nullable=False),
    sa.UniqueConstraint("workload_key", "target_key"),
)

# A device with versions of TVM and of this package.
environments = Table(
    "tvm_adaptive_environments",
    metadata,
    Column("id", Integer, primary_key=True),
    # Digest: the texts together are too long for an index on some databases.
    Column("key", String(64), nullable=False, unique=True),
    Column("device", Text, nullable=False),
    Column("tvm", Text, nullable=False),
    Column("tvm_ffi", Text, nullable=False),
    Column("tvm_adaptive", Text, nullable=False),
)


def _measured(*features: Column[Any], index: bool | None = None) -> list[Column[Any]]:
    """Return the columns of a table of measured candidates."""
    task = ForeignKey(tasks.c.id, ondelete="CASCADE")
    return [
        Column("id", Integer, primary_key=True),
        Column("task_id", task, nullable=False, index=index),
        Column("record", Text, nullable=False),
        Column("seconds", Float),
        Column("error", Float),
        Column("failure", Text, nullable=False),
        *features,
        Column("unix_sec", Float, nullable=False),
        # Text: for imported records it is a folder's path.
        Column("run", Text, nullable=False),
        # NULL where the environment is unknown.
        Column("environment_id", ForeignKey(environments.c.id)),
    ]


# A measured candidate of a task, failed ones included.
trials = Table("tvm_adaptive_trials", metadata, *_measured(Column("features", sa.LargeBinary)))
# A play-off's verdict on one candidate of a task.
finals = Table("tvm_adaptive_finals", metadata, *_measured(index=True))
sa.Index("tvm_adaptive_trials_by_time", trials.c.task_id, trials.c.seconds)
