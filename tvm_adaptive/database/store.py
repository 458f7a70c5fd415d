"""The record store: what was ever measured, kept across runs and shared between people.

A SQLite file by default, in write-ahead mode, so that several runs may write at once and
a killed one leaves no half of a batch; PostgreSQL by URL for a team. What ``add`` has
returned from is on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tvm_adaptive.database import schema
from tvm_adaptive.database.engine import (
    BUSY_TIMEOUT_SEC,
    INSERTS,
    advice_on,
    set_up_sqlite,
    url_of,
)
from tvm_adaptive.database.records import (
    StoredTask,
    StoredTrial,
    TaskStats,
    pack_features,
    unpack_features,
)
from tvm_adaptive.errors import StoreError

logger = logging.getLogger(__name__)

# Of PostgreSQL's advisory locks, any number that nobody else uses.
_CREATE_LOCK = 0x7674_6D61


class RecordStore:
    """Trials by task, appended and asked for.

    Parameters
    ----------
    url : str or Path
        A path of a SQLite file, created if missing, or a URL as SQLAlchemy takes it,
        such as ``"postgresql+psycopg://user:secret@host/name"``.

    Raises
    ------
    StoreError
        When the file is no store, is damaged or of a newer version, or the server cannot
        be reached; what is there is left as it is.
    """

    def __init__(self, url: str | Path) -> None:
        self.url = url_of(url)
        self._engine = self._connect()
        # SQLAlchemy's engine may be used by several threads, a transaction by one.
        self._lock = threading.Lock()
        self._check_or_create()

    @property
    def name(self) -> str:
        """What to call the store in a message; without a password."""
        if self.url.get_backend_name() == "sqlite":
            return str(self.url.database)
        return self.url.render_as_string(hide_password=True)

    def add(self, task: StoredTask, trials: Sequence[StoredTrial]) -> None:
        """Append trials, all or none; they are on disk when this returns.

        Raises
        ------
        StoreError
            When they could not be written (disk full, server gone); none of them is then.
        """
        self._append(schema.trials, task, trials)

    def add_finals(self, task: StoredTask, finals: Sequence[StoredTrial]) -> None:
        """Append what a play-off said of candidates, its winner first, without features.

        Raises
        ------
        StoreError
            When it could not be written; nothing is then.
        """
        self._append(schema.finals, task, finals)

    def tasks(self, *, family: str | None = None, target: str | None = None) -> list[StoredTask]:
        """Return the tasks of a family, on a target, or all, in the order they came.

        Raises
        ------
        StoreError
        """
        query = sa.select(schema.tasks).order_by(schema.tasks.c.id)
        if family is not None:
            query = query.where(schema.tasks.c.family == family)
        if target is not None:
            query = query.where(schema.tasks.c.target == target)
        with self._guard("read"), self._engine.connect() as connection:
            return [_task_of(row) for row in connection.execute(query).mappings()]

    def best(self, task: StoredTask, n: int, *, without: Collection[str] = ()) -> list[StoredTrial]:
        """Return the ``n`` fastest trials of a task, fastest first.

        Parameters
        ----------
        task : StoredTask
        n : int
        without : collection of str, default ()
            Runs whose trials are not asked for.

        Raises
        ------
        StoreError
        """
        trials = schema.trials.c
        query = self._of(task).where(trials.seconds.is_not(None), trials.run.not_in(without))
        return self._trials(query.order_by(trials.seconds, trials.id).limit(n))

    def latest(self, task: StoredTask, n: int | None = None) -> list[StoredTrial]:
        """Return the last ``n`` trials of a task, or all, in the order measured.

        Raises
        ------
        StoreError
        """
        query = self._of(task).order_by(schema.trials.c.id.desc()).limit(n)
        return self._trials(query)[::-1]

    def seconds(self, task: StoredTask, *, without: Collection[str] = ()) -> list[float]:
        """Return what each trial of a task took, in the order measured; NaN for a failure.

        Parameters
        ----------
        task : StoredTask
        without : collection of str, default ()
            Runs whose trials are not asked for.

        Raises
        ------
        StoreError
        """
        trials = schema.trials.c
        query = sa.select(trials.seconds).join_from(schema.trials, schema.tasks)
        query = query.where(*_is_task(task), trials.run.not_in(without)).order_by(trials.id)
        with self._guard("read"), self._engine.connect() as connection:
            return [math.nan if each is None else each for each in connection.scalars(query)]

    def finals(self, task: StoredTask) -> list[StoredTrial]:
        """Return what play-offs said of a task's candidates, in the order they were held.

        Seconds and their error are the play-off's; a failure says why a candidate must not
        be used. What to make of it: :mod:`tvm_adaptive.database.verdicts`.

        Raises
        ------
        StoreError
        """
        joined = schema.finals.join(schema.tasks)
        query = sa.select(*schema.finals.c).select_from(joined).where(*_is_task(task))
        return self._trials(query.order_by(schema.finals.c.id))

    def sample(self, task: StoredTask, n: int) -> list[StoredTrial]:
        """Return at most ``n`` trials of a task in the order measured: the best, and others.

        Half of them are the fastest, the others lie evenly over the task's whole history,
        failures included.

        Raises
        ------
        StoreError
        """
        trials = schema.trials.c
        of_task = sa.select(trials.id).join_from(schema.trials, schema.tasks).where(*_is_task(task))
        with self._guard("read"), self._engine.connect() as connection:
            ids = list(connection.scalars(of_task.order_by(trials.id)))
            if len(ids) > n:
                fastest = of_task.where(trials.seconds.is_not(None)).order_by(trials.seconds)
                best = connection.scalars(fastest.limit(n // 2))
                ids = sorted({*best, *evenly(ids, n - n // 2)})
        query = sa.select(*schema.trials.c).where(trials.id.in_(ids)).order_by(trials.id)
        return self._trials(query)

    def stats(self) -> list[TaskStats]:
        """Return what there is, per task.

        Raises
        ------
        StoreError
        """
        trials, tasks = schema.trials.c, schema.tasks.c
        query = (
            sa.select(
                *schema.tasks.c,
                sa.func.count(trials.id).label("n_trials"),
                sa.func.count(trials.seconds).label("n_successes"),
                sa.func.min(trials.seconds).label("best_sec"),
                sa.func.coalesce(sa.func.max(trials.unix_sec), 0.0).label("last"),
            )
            .select_from(schema.tasks.outerjoin(schema.trials))
            .group_by(*schema.tasks.c)
            .order_by(tasks.id)
        )
        with self._guard("read"), self._engine.connect() as connection:
            return [
                TaskStats(
                    _task_of(row),
                    int(row["n_trials"]),
                    int(row["n_trials"]) - int(row["n_successes"]),
                    None if row["best_sec"] is None else float(row["best_sec"]),
                    float(row["last"]),
                )
                for row in connection.execute(query).mappings()
            ]

    def prune(self, keep: int) -> int:
        """Keep the ``keep`` fastest trials of each task; return how many were deleted.

        Of what play-offs said the newest ``keep`` of each task stay. A file then becomes
        as small as what is left in it.

        Raises
        ------
        StoreError
            Nothing is deleted then.
        """
        trials, finals = schema.trials.c, schema.finals.c
        by_time = (trials.seconds.is_(None), trials.seconds, trials.id)
        with self._lock, self._guard("write to"), self._begin() as connection:
            connection.execute(_all_but(keep, schema.finals, [finals.id.desc()]))
            n_deleted = int(connection.execute(_all_but(keep, schema.trials, by_time)).rowcount)
        if self.url.get_backend_name() == "sqlite":
            with self._lock, self._guard("write to"), self._engine.connect() as connection:
                connection.exec_driver_sql("VACUUM")
        return n_deleted

    def close(self) -> None:
        """Let go of the file or the server."""
        self._engine.dispose()

    def __enter__(self) -> RecordStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, table: sa.Table, task: StoredTask, trials: Sequence[StoredTrial]) -> None:
        """Append what a table has columns for."""
        rows = [
            {key: value for key, value in _row_of(trial).items() if key in table.c}
            for trial in trials
        ]
        with self._lock, self._guard("write to"), self._begin() as connection:
            task_id = self._task_id(connection, task)
            if rows:
                connection.execute(sa.insert(table), [{"task_id": task_id, **row} for row in rows])

    def _connect(self) -> sa.Engine:
        if self.url.get_backend_name() != "sqlite":
            with self._guard("open"):
                # A connection that the server dropped overnight is made anew.
                return sa.create_engine(self.url, pool_pre_ping=True)
        if self.url.database:
            path = Path(self.url.database)
            with self._guard("open"):
                path.parent.mkdir(parents=True, exist_ok=True)
        engine = sa.create_engine(self.url, connect_args={"timeout": BUSY_TIMEOUT_SEC})
        sa.event.listen(engine, "connect", set_up_sqlite)
        return engine

    @contextlib.contextmanager
    def _begin(self) -> Iterator[sa.Connection]:
        """Begin a transaction that writes."""
        with self._engine.connect() as connection:
            if self.url.get_backend_name() == "sqlite":
                # Two readers that both become writers would wait for one another for ever.
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.commit()
            except BaseException:
                connection.rollback()
                raise

    def _check_or_create(self) -> None:
        with self._guard("open"):
            with self._engine.connect() as connection:
                there = set(sa.inspect(connection).get_table_names())
            if schema.meta.name not in there:
                self._create()
            query = sa.select(schema.meta.c.value).where(schema.meta.c.key == "version")
            with self._engine.connect() as connection:
                version = connection.execute(query).scalar_one_or_none()
        if version != str(schema.FORMAT_VERSION):
            raise StoreError(
                f"{self.name} has format version {version}, this package reads "
                f"{schema.FORMAT_VERSION}. Update tvm_adaptive, or name another store."
            )
        if not there.issuperset(schema.metadata.tables):
            with self._guard("open"):
                self._create()

    def _create(self) -> None:
        """Make the tables that are missing."""
        with self._begin() as connection:
            if self.url.get_backend_name() == "postgresql":
                # One creates the tables, the others wait and find them.
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATE_LOCK)))
            schema.metadata.create_all(connection)
            self._insert_unless_there(
                connection, schema.meta, {"key": "version", "value": str(schema.FORMAT_VERSION)}
            )

    def _task_id(self, connection: sa.Connection, task: StoredTask) -> int:
        self._insert_unless_there(
            connection,
            schema.tasks,
            {**dataclasses.asdict(task), "target_key": task.target_key},
        )
        query = sa.select(schema.tasks.c.id).where(*_is_task(task))
        return int(connection.execute(query).scalar_one())

    def _insert_unless_there(
        self, connection: sa.Connection, table: sa.Table, values: dict[str, Any]
    ) -> None:
        insert: Any = INSERTS[self.url.get_backend_name()]
        connection.execute(insert(table).values(**values).on_conflict_do_nothing())

    def _of(self, task: StoredTask) -> sa.Select[Any]:
        joined = schema.trials.join(schema.tasks)
        return sa.select(*schema.trials.c).select_from(joined).where(*_is_task(task))

    def _trials(self, query: sa.Select[Any]) -> list[StoredTrial]:
        with self._guard("read"), self._engine.connect() as connection:
            return [_trial_of(row) for row in connection.execute(query).mappings()]

    @contextlib.contextmanager
    def _guard(self, action: str) -> Iterator[None]:
        """Turn what a database may raise into an error of ours that says what to do."""
        try:
            yield
        except (sa.exc.SQLAlchemyError, sqlite3.Error, OSError, ImportError) as error:
            reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
            raise StoreError(
                f"Could not {action} the record store {self.name}: {reason}. {advice_on(reason)}"
            ) from error


def _all_but(keep: int, table: sa.Table, order: Sequence[sa.ColumnElement[Any]]) -> sa.Delete:
    """Return what deletes all rows of each task but the first few by an order."""
    rank = sa.func.row_number().over(partition_by=table.c.task_id, order_by=tuple(order))
    ranked = sa.select(table.c.id, rank.label("rank")).subquery()
    gone = sa.select(ranked.c.id).where(ranked.c.rank > keep)
    return sa.delete(table).where(table.c.id.in_(gone))


def _is_task(task: StoredTask) -> tuple[sa.ColumnElement[bool], ...]:
    columns = schema.tasks.c
    return (columns.workload_key == task.workload_key, columns.target_key == task.target_key)


def evenly(values: Sequence[int], n: int) -> list[int]:
    """Return about ``n`` of some values, the first and the last among them."""
    step = (len(values) - 1) / max(1, n - 1)
    return [values[round(i * step)] for i in range(n)]


def _row_of(trial: StoredTrial) -> dict[str, Any]:
    row = {field.name: getattr(trial, field.name) for field in dataclasses.fields(trial)}
    # What a crashed process leaves is any bytes; PostgreSQL takes no text with a NUL.
    failure = trial.failure.replace("\0", "").encode(errors="replace").decode()
    return {**row, "failure": failure, "features": pack_features(trial.features)}


def _task_of(row: Any) -> StoredTask:
    names = [field.name for field in dataclasses.fields(StoredTask)]
    return StoredTask(**{name: str(row[name]) for name in names})


def _trial_of(row: Any) -> StoredTrial:
    names = [field.name for field in dataclasses.fields(StoredTrial)]
    fields = {name: row[name] for name in names if name in row}
    try:
        fields["features"] = unpack_features(fields.get("features"))
    except ValueError:
        logger.warning("a trial's features are damaged and left out")
        fields["features"] = None
    return StoredTrial(**fields)
