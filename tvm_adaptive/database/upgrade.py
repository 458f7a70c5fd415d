"""Create a record store's tables, or upgrade those of an older format.

Each step leads from one format to the next in its own transaction, so that an interrupted
step leaves nothing behind. No backup is made: steps add columns and tables and rewrite no row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import sqlalchemy as sa

from tvm_adaptive.database import schema
from tvm_adaptive.database.engine import LONG_ANSWER_TIMEOUT_SEC, connected, transaction
from tvm_adaptive.errors import StoreError

logger = logging.getLogger(__name__)

# An arbitrary number among PostgreSQL's advisory locks.
_CREATE_LOCK = 0x7674_6D61


def prepare(engine: sa.Engine, name: str) -> None:
    """Make a store have the tables of the present format."""
    with connected(engine) as connection:
        is_new = not sa.inspect(connection).has_table(schema.meta.name)
        version = None if is_new else _version_of(connection)
    if is_new:
        with transaction(engine, LONG_ANSWER_TIMEOUT_SEC) as connection:
            _lock_others_out(connection)
            if not sa.inspect(connection).has_table(schema.meta.name):
                schema.metadata.create_all(connection)
                values = {"key": "version", "value": str(schema.FORMAT_VERSION)}
                connection.execute(sa.insert(schema.meta).values(values))
            version = _version_of(connection)
    while version != str(schema.FORMAT_VERSION):
        if version is None or version not in STEPS:
            raise StoreError(
                f"{name} has format version {version}, this package reads "
                f"{schema.FORMAT_VERSION}. Update tvm_adaptive, or name another store."
            )
        version = _upgrade_once(engine, version, name)


def _upgrade_once(engine: sa.Engine, version: str, name: str) -> str | None:
    """Upgrade to the next format unless another process has done so; return the format."""
    with transaction(engine, LONG_ANSWER_TIMEOUT_SEC) as connection:
        _lock_others_out(connection)
        if _version_of(connection) == version:
            STEPS[version](connection)
            new = {"value": str(int(version) + 1)}
            is_version = schema.meta.c.key == "version"
            connection.execute(sa.update(schema.meta).where(is_version).values(new))
            logger.info("%s: upgraded from format version %s", name, version)
        return _version_of(connection)


def _lock_others_out(connection: sa.Connection) -> None:
    """Let one client at a time create or change tables; SQLite does so anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATE_LOCK)))


def _version_of(connection: sa.Connection) -> str | None:
    query = sa.select(schema.meta.c.value).where(schema.meta.c.key == "version")
    return connection.execute(query).scalar_one_or_none()


def _add_environments(connection: sa.Connection) -> None:
    """Add the environment of each row, and allow run names of any length."""
    # Tables as they were when this step was written: the present ones may differ later.
    tables = sa.MetaData()
    key = sa.Column("key", sa.String(64), nullable=False, unique=True)
    texts = [
        sa.Column(name, sa.Text, nullable=False)
        for name in ("device", "tvm", "tvm_ffi", "tvm_adaptive")
    ]
    number = sa.Column("id", sa.Integer, primary_key=True)
    sa.Table("tvm_adaptive_environments", tables, number, key, *texts)
    sa.Table("tvm_adaptive_tasks", tables, sa.Column("id", sa.Integer, primary_key=True))
    # The first stores had no finals.
    task = sa.ForeignKey("tvm_adaptive_tasks.id", ondelete="CASCADE")
    sa.Table(
        "tvm_adaptive_finals",
        tables,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("task_id", task, nullable=False, index=True),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("seconds", sa.Float),
        sa.Column("error", sa.Float),
        sa.Column("failure", sa.Text, nullable=False),
        sa.Column("unix_sec", sa.Float, nullable=False),
        sa.Column("run", sa.Text, nullable=False),
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
