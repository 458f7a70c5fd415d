"""The tables of a record store: made in a new one, upgraded in one of an older format.

Each upgrade leads from one format to the next in its own transaction, so that an interrupted
one leaves nothing behind. No backup is made: upgrades add columns and tables, rewrite no row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Column, Float, ForeignKey, Integer, String, Table, Text

from tvm_adaptive.database.engine import LONG_ANSWER_TIMEOUT_SEC, connected, transaction
from tvm_adaptive.errors import StoreError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
# An arbitrary number among PostgreSQL's advisory locks.
_CREATE_LOCK = 0x7674_6D61

metadata = sa.MetaData()

# The prefix of the names keeps them apart from other tables of a team's database.

# A row is its format version, or the key of a model that was tuned into it.
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


def prepare(engine: sa.Engine, name: str) -> None:
    """Make a store have the tables of the present format."""
    with connected(engine) as connection:
        is_new = not sa.inspect(connection).has_table(meta.name)
        version = None if is_new else _version_of(connection)
    if is_new:
        with transaction(engine, LONG_ANSWER_TIMEOUT_SEC) as connection:
            _lock_others_out(connection)
            if not sa.inspect(connection).has_table(meta.name):
                metadata.create_all(connection)
                values = {"key": "version", "value": str(FORMAT_VERSION)}
                connection.execute(sa.insert(meta).values(values))
            version = _version_of(connection)
    while version != str(FORMAT_VERSION):
        if version is None or version not in STEPS:
            raise StoreError(
                f"{name} has format version {version}, this package reads "
                f"{FORMAT_VERSION}. Update tvm_adaptive, or name another store."
            )
        version = _upgrade_once(engine, version, name)


def _upgrade_once(engine: sa.Engine, version: str, name: str) -> str | None:
    """Upgrade to the next format unless another process has done so; return the format."""
    with transaction(engine, LONG_ANSWER_TIMEOUT_SEC) as connection:
        _lock_others_out(connection)
        if _version_of(connection) == version:
            STEPS[version](connection)
            new = {"value": str(int(version) + 1)}
            is_version = meta.c.key == "version"
            connection.execute(sa.update(meta).where(is_version).values(new))
            logger.info("%s: upgraded from format version %s", name, version)
        return _version_of(connection)


def _lock_others_out(connection: sa.Connection) -> None:
    """Let one client at a time create or change tables; SQLite does so anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATE_LOCK)))


def _version_of(connection: sa.Connection) -> str | None:
    query = sa.select(meta.c.value).where(meta.c.key == "version")
    return connection.execute(query).scalar_one_or_none()


def _add_environments(connection: sa.Connection) -> None:
    """Add the environment of each row, and allow run names of any length."""
    # Tables as they were when this step was written: the present ones may differ later.
    tables = sa.MetaData()
    key = Column("key", String(64), nullable=False, unique=True)
    texts = [
        Column(name, Text, nullable=False) for name in ("device", "tvm", "tvm_ffi", "tvm_adaptive")
    ]
    number = Column("id", Integer, primary_key=True)
    Table("tvm_adaptive_environments", tables, number, key, *texts)
    Table("tvm_adaptive_tasks", tables, Column("id", Integer, primary_key=True))
    # The first stores had no finals.
    task = ForeignKey("tvm_adaptive_tasks.id", ondelete="CASCADE")
    Table(
        "tvm_adaptive_finals",
        tables,
        Column("id", Integer, primary_key=True),
        Column("task_id", task, nullable=False, index=True),
        Column("record", Text, nullable=False),
        Column("seconds", Float),
        Column("error", Float),
        Column("failure", Text, nullable=False),
        Column("unix_sec", Float, nullable=False),
        Column("run", Text, nullable=False),
    )
    tables.create_all(connection)
    for table in ("tvm_adaptive_trials", "tvm_adaptive_finals"):
        connection.exec_driver_sql(
            f"ALTER TABLE {table} ADD COLUMN environment_id INTEGER "
            "REFERENCES tvm_adaptive_environments (id)"
        )
        # SQLite enforces no lengths.
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"ALTER TABLE {table} ALTER COLUMN run TYPE TEXT")


# By the format that each step starts from.
STEPS: Mapping[str, Callable[[sa.Connection], None]] = {"1": _add_environments}
