"""Make a record store's tables, or bring those of an older format to the present one.

Each step leads from one format to the next, in a transaction of its own: a step that is
interrupted has not begun. No copy of a file is made before: steps add columns and tables,
and rewrite no row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import sqlalchemy as sa

from tvm_adaptive.database import schema
from tvm_adaptive.database.engine import LONG_ANSWER_TIMEOUT_SEC, connected, transaction
from tvm_adaptive.errors import StoreError

logger = logging.getLogger(__name__)

# Of PostgreSQL's advisory locks, any number that nobody else uses.
_CREATE_LOCK = 0x7674_6D61

Step = Callable[[sa.Connection], None]


def prepare(engine: sa.Engine, name: str) -> None:
    """See that a store has the tables of the present format."""
    with connected(engine) as connection:
        is_new = not sa.inspect(connection).has_table(schema.meta.name)
        version = None if is_new else _version_of(connection)
    if is_new:
        with transaction(engine, LONG_ANSWER_TIMEOUT_SEC) as connection:
            _keep_others_out(connection)
            if not sa.inspect(connection).has_table(schema.meta.name):
                _create(connection)
            version = _version_of(connection)
    while version != str(schema.FORMAT_VERSION):
        if version is None or version not in STEPS:
            raise StoreError(
                f"{name} has format version {version}, this package reads "
                f"{schema.FORMAT_VERSION}. Update tvm_adaptive, or name another store."
            )
        version = _step_up(engine, version, name)


def _create(connection: sa.Connection) -> None:
    schema.metadata.create_all(connection)
    version = {"key": "version", "value": str(schema.FORMAT_VERSION)}
    connection.execute(sa.insert(schema.meta).values(version))


def _step_up(engine: sa.Engine, version: str, name: str) -> str | None:
    """Bring a store to the next format, unless another process has done so; return its format."""
    with transaction(engine, LONG_ANSWER_TIMEOUT_SEC) as connection:
        _keep_others_out(connection)
        if _version_of(connection) == version:
            STEPS[version](connection)
            new = {"value": str(int(version) + 1)}
            is_version = schema.meta.c.key == "version"
            connection.execute(sa.update(schema.meta).where(is_version).values(new))
            logger.info("%s: upgraded from format version %s", name, version)
        return _version_of(connection)


def _keep_others_out(connection: sa.Connection) -> None:
    """Let one create or change tables, while the others wait; SQLite's writers do so anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATE_LOCK)))


def _version_of(connection: sa.Connection) -> str | None:
    query = sa.select(schema.meta.c.value).where(schema.meta.c.key == "version")
    return connection.execute(query).scalar_one_or_none()


def _add_environments(connection: sa.Connection) -> None:
    """Let rows say where they were measured, and runs have names of any length."""
    # As they were when this step was written: the present tables may differ by now.
    tables = sa.MetaData()
    key = sa.Column("key", sa.String(64), nullable=False, unique=True)
    texts = [
        sa.Column(name, sa.Text, nullable=False)
        for name in ("device", "tvm", "tvm_ffi", "tvm_adaptive")
    ]
    number = sa.Column("id", sa.Integer, primary_key=True)
    sa.Table("tvm_adaptive_environments", tables, number, key, *texts)
    sa.Table("tvm_adaptive_tasks", tables, sa.Column("id", sa.Integer, primary_key=True))
    # The first stores had none.
    sa.Table(
        "tvm_adaptive_finals",
        tables,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column(
            "task_id",
            sa.ForeignKey("tvm_adaptive_tasks.id", ondelete="CASCADE"),
            nullable=False,
            index=True,
        ),
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
        # SQLite minds no lengths.
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"ALTER TABLE {table} ALTER COLUMN run TYPE TEXT")


# By the format that each begins with.
STEPS: Mapping[str, Step] = {"1": _add_environments}
