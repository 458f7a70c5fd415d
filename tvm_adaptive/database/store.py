"""The record store: all trials ever measured, kept across runs and shared between people.

It is a SQLite file by default, which several runs may write at once, and PostgreSQL by URL
for a team. Invalid rows are left out and counted (:mod:`tvm_adaptive.database.records`).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tvm_adaptive.database import schema, tables
from tvm_adaptive.database.engine import (
    ANSWER_TIMEOUT_SEC,
    LONG_ANSWER_TIMEOUT_SEC,
    advice_on,
    connected,
    engine_of,
    transaction,
)
from tvm_adaptive.database.location import (
    FROM_ENVIRONMENT,
    NO_STORE,
    USER_STORE,
    displayed,
    resolve_url,
    scrubbed,
    url_of,
)
from tvm_adaptive.database.records import StoredTask, StoredTrial, TaskStats, task_of_row
from tvm_adaptive.errors import StoreDataError, StoreError
from tvm_adaptive.workers.environment import UNKNOWN, Environment

logger = logging.getLogger(__name__)

# The latest time that a calendar can show.
_LAST_UNIX_SEC = 1e11
# Of a digest among the facts about the store.
_TUNED = "tuned"
# A column of tasks: the whole module, tens of kilobytes.
_WORKLOAD = "workload"


class RecordStore:
    """Trials by task, to append and to query.

    Every wait has a bound: a database that hangs is an error after some seconds.

    Parameters
    ----------
    url : str or Path
        A path of a SQLite file, created if missing, or a URL as SQLAlchemy takes it,
        such as ``"postgresql+psycopg://user:secret@host/name"``. A store of an older format
        is upgraded.
    environment : Environment or None, default None
        Where its user measures; see :meth:`at`.

    Raises
    ------
    StoreError
        When the file is not a store, is damaged or of a newer version, or the server cannot
        be reached; the file stays as it is. Every method that reads or writes raises it, too.
    """

    def __init__(self, url: str | Path, environment: Environment | None = None) -> None:
        self.url = url_of(url)
        self.environment = environment
        with self._guard("open"):
            if self.url.get_backend_name() == "sqlite" and self.url.database:
                Path(self.url.database).parent.mkdir(parents=True, exist_ok=True)
            self._engine = engine_of(self.url)
        self._lock = threading.Lock()
        self._valid = tables.ValidRows()
        with self._guard("open"):
            schema.prepare(self._engine, self.name)

    def at(self, environment: Environment | None) -> RecordStore:
        """Return the same store for a user who measures in an environment.

        Times of another device or another TVM cannot be compared. So trials measured
        elsewhere are returned only with ``elsewhere``, except that a candidate which a
        play-off disqualified is disqualified everywhere. Trials that are added without an
        environment were measured in this one. None reads trials of all environments. Both
        objects have the same connections, which are closed once.
        """
        bound = copy.copy(self)
        bound.environment = environment
        return bound

    @property
    def name(self) -> str:
        """Name of the store in messages, without a password."""
        return displayed(self.url)

    @property
    def n_left_out(self) -> int:
        """Invalid rows found so far."""
        return self._valid.n_left_out

    def add(self, task: StoredTask, trials: Sequence[StoredTrial]) -> None:
        """Append trials, all or none; they are on disk when this returns."""
        self._append(schema.trials, task, trials)

    def add_finals(self, task: StoredTask, finals: Sequence[StoredTrial]) -> None:
        """Append a play-off's verdicts on candidates, its winner first, without features."""
        self._append(schema.finals, task, finals)

    def tasks(
        self,
        *,
        family: str | None = None,
        target: str | None = None,
        workload_keys: Collection[str] | None = None,
        newest: int | None = None,
        with_workload: bool = True,
    ) -> list[StoredTask]:
        """Return tasks in the order of their arrival: of a family, a target, workloads, or all.

        With ``newest``, only the last so many of those that have a trial. Workloads are empty
        unless ``with_workload``.
        """
        columns = schema.tasks.c
        query = sa.select(columns.id).order_by(columns.id if newest is None else columns.id.desc())
        if family is not None:
            query = query.where(columns.family == family)
        if target is not None:
            query = query.where(columns.target == target)
        if workload_keys is not None:
            query = query.where(columns.workload_key.in_(workload_keys))
        if newest is not None:
            has_trial = sa.exists().where(schema.trials.c.task_id == columns.id)
            query = query.where(has_trial).limit(newest + tables.MAX_BAD_ROWS)
        with self._reading() as connection, closing(connection.scalars(query)) as ids:
            without = () if with_workload else (_WORKLOAD,)
            found = self._valid.tasks(connection, ids, newest, without=without)
        return found if newest is None else found[::-1]

    def best(
        self, task: StoredTask, n: int, *, without: Collection[str] = (), elsewhere: bool = False
    ) -> list[StoredTrial]:
        """Return the ``n`` fastest trials of a task, fastest first, without features.

        The runs ``without`` are left out. With ``elsewhere``, only trials of other
        environments than the store's, whose times do not compare.
        """
        trials = schema.trials
        query = tables.ids_of(trials, task).where(
            tables.is_timed(trials),
            trials.c.run.not_in(without),
            *tables.is_from(trials, self.environment, elsewhere),
        )
        query = query.order_by(trials.c.seconds, trials.c.id)
        return self._read(trials, query, n, "features")

    def latest(self, task: StoredTask) -> list[StoredTrial]:
        """Return the trials of a task in the order measured."""
        trials = schema.trials
        query = tables.ids_of(trials, task).where(*tables.is_from(trials, self.environment))
        # However many there are: whoever asks for all of them needs each.
        return self._read(trials, query.order_by(trials.c.id), limit_sec=LONG_ANSWER_TIMEOUT_SEC)

    def has_trials(self, task: StoredTask, n: int) -> bool:
        """Return whether a task has at least ``n`` trials, failed ones included."""
        trials = schema.trials
        query = tables.ids_of(trials, task).where(*tables.is_from(trials, self.environment))
        with self._reading() as connection:
            return len(connection.scalars(query.limit(n)).all()) >= n

    def seconds(self, task: StoredTask, *, without: Collection[str] = ()) -> list[float]:
        """Return the seconds of each trial of a task in the order measured; NaN for a failure.

        The runs ``without`` and rows known to be invalid are left out; records are not read.
        """
        trials = schema.trials
        query = sa.select(trials.c.id, trials.c.seconds).join_from(trials, schema.tasks)
        query = query.where(
            *tables.is_task(task),
            trials.c.run.not_in(without),
            trials.c.seconds.is_(None) | tables.is_timed(trials),
            *tables.is_from(trials, self.environment),
        )
        bad = set(self._valid.bad(trials))
        with self._reading() as connection:
            return [
                math.nan if seconds is None else float(seconds)
                for row_id, seconds in connection.execute(query.order_by(trials.c.id))
                if row_id not in bad
            ]

    def finals(self, task: StoredTask, *, elsewhere: bool = False) -> list[StoredTrial]:
        """Return the play-offs' verdicts on a task's candidates, oldest first.

        The order is that of the play-offs, not of arrival: a run may be imported later.
        Seconds and their error are the play-off's; a failure says why the candidate must not
        be used. :mod:`tvm_adaptive.database.verdicts` interprets them. With ``elsewhere``,
        only those with a time from another environment than the store's.
        """
        finals = schema.finals
        is_here = sa.and_(sa.true(), *tables.is_from(finals, self.environment, elsewhere))
        is_failure = finals.c.seconds.is_(None)
        is_wanted = is_here & ~is_failure if elsewhere else is_here | is_failure
        newest = tables.ids_of(finals, task).where(is_wanted).order_by(finals.c.id.desc())
        rows = self._read(finals, newest.limit(tables.MAX_BAD_ROWS))[::-1]
        # A clock may be slow: what disqualifies a candidate comes after all that arrived before.
        latest, keys = -math.inf, []
        for row in rows:
            key = row.unix_sec if row.seconds is not None else max(latest, row.unix_sec)
            latest = max(latest, key)
            keys.append(key)
        return [rows[place] for place in sorted(range(len(rows)), key=keys.__getitem__)]

    def sample(
        self,
        task: StoredTask,
        n: int,
        *,
        without: Collection[str] = (),
        width: int | None = None,
        with_record: bool = True,
    ) -> list[StoredTrial]:
        """Return at most ``n`` trials of a task in the order measured.

        Half of them are the fastest; the others, failures included, lie evenly over the
        task's history. The runs ``without`` are left out. With ``width``, only trials with this
        number of features. Records are empty unless ``with_record``.
        """

        def is_wide(trial: StoredTrial) -> bool:
            return width is None or (trial.features is not None and len(trial.features) == width)

        trials, left_out = schema.trials, () if with_record else ("record",)
        options: dict[str, Any] = {"without": left_out, "wanted": is_wide}
        of_task = tables.ids_of(trials, task).where(*tables.is_from(trials, self.environment))
        if without:
            of_task = of_task.where(trials.c.run.not_in(without))
        if width is not None:
            of_task = of_task.where(trials.c.features.is_not(None))
        fastest = of_task.where(tables.is_timed(trials)).order_by(trials.c.seconds, trials.c.id)
        with self._reading() as connection:
            ids = list(connection.scalars(of_task.order_by(trials.c.id)))
            found: dict[int, StoredTrial] = {}
            if len(ids) > n:
                best = list(connection.scalars(fastest.limit(n // 2 + tables.MAX_BAD_ROWS)))
                found.update(self._valid.trials(connection, trials, best, n // 2, **options))
                ids = [row_id for row_id in tables.spread_out(ids) if row_id not in found]
                ids = ids[: n + tables.MAX_BAD_ROWS]
            found.update(self._valid.trials(connection, trials, ids, n - len(found), **options))
        return [found[row_id] for row_id in sorted(found)]

    def stats(self) -> list[TaskStats]:
        """Return counts and times per task; workloads are not read."""
        trials = schema.trials
        timed = sa.case((tables.is_timed(trials), trials.c.seconds))
        known = sa.case((trials.c.unix_sec.between(0.0, _LAST_UNIX_SEC), trials.c.unix_sec))
        query = sa.select(
            trials.c.task_id,
            sa.func.count(trials.c.id),
            sa.func.count(trials.c.seconds),
            sa.func.min(timed),
            sa.func.coalesce(sa.func.max(known), 0.0),
        )
        query = query.where(*tables.is_from(trials, self.environment)).group_by(trials.c.task_id)
        with self._reading() as connection:
            counts = {row[0]: row[1:] for row in connection.execute(query)}
            columns = (column for column in schema.tasks.c if column.name != _WORKLOAD)
            rows = connection.execute(sa.select(*columns).order_by(schema.tasks.c.id))
            tasks = [(row["id"], task_of_row(row)) for row in rows.mappings()]
        found = []
        for task_id, task in tasks:
            n_trials, n_successes, best, last = counts.get(task_id, (0, 0, None, 0.0))
            if task is not None:
                best_sec = None if best is None else float(best)
                n_failures = n_trials - n_successes
                found.append(TaskStats(task, n_trials, n_failures, best_sec, float(last)))
        return found

    def prune(self, keep: int) -> int:
        """Keep the ``keep`` fastest trials of each task; return how many were deleted.

        The trials of each device are counted apart, as their times do not compare. The
        play-offs' verdicts stay, which say what may be deployed; invalid rows are deleted.
        After an error nothing is deleted. Then the file shrinks to what is left in it, if the
        disk has room for a copy and no other process reads it.
        """
        trials, finals = schema.trials, schema.finals
        by_time = (trials.c.seconds.is_(None), trials.c.seconds, trials.c.id)
        where = schema.environments.c  # but for the package's version, which changes no times
        groups = [trials.c.task_id, where.device, where.tvm, where.tvm_ffi]
        with self._reading(LONG_ANSWER_TIMEOUT_SEC) as connection:
            for table in (trials, finals):
                ids = list(connection.scalars(sa.select(table.c.id)))
                self._valid.trials(connection, table, ids, wanted=lambda _: False)
            ids = list(connection.scalars(sa.select(schema.tasks.c.id)))
            self._valid.tasks(connection, ids, wanted=lambda _: False)
        with self._writing(LONG_ANSWER_TIMEOUT_SEC) as connection:
            n_deleted = tables.delete(connection, trials, self._valid.bad(trials))
            n_deleted += tables.delete_all_but(connection, trials, keep, by_time, groups)
            tables.delete(connection, finals, self._valid.bad(finals))
            # With their trials and verdicts, which nothing can be done with.
            tables.delete(connection, schema.tasks, self._valid.bad(schema.tasks))
        self._valid.forget()
        if self.url.get_backend_name() == "sqlite":
            try:
                with self._lock, self._guard("write to"), connected(self._engine) as connection:
                    connection.exec_driver_sql("VACUUM")
            except StoreError as error:
                logger.warning("The rows are deleted, but the file keeps its size: %s", error)
        return n_deleted

    def was_tuned(self, key: str) -> bool:
        """Return whether a model's key was noted by :meth:`note_tuned`."""
        columns = schema.meta.c
        query = sa.select(sa.exists().where(columns.key == key, columns.value == _TUNED))
        with self._reading() as connection:
            return bool(connection.scalar(query))

    def note_tuned(self, key: str) -> None:
        """Note a model's key, a digest, when its records were added."""
        with self._writing() as connection:
            tables.insert_if_missing(connection, schema.meta, {"key": key, "value": _TUNED})

    def close(self) -> None:
        """Close the connections to the file or the server."""
        self._engine.dispose()

    def __enter__(self) -> RecordStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, table: sa.Table, task: StoredTask, trials: Sequence[StoredTrial]) -> None:
        default = self.environment or UNKNOWN
        with self._writing() as connection:
            tables.append(connection, table, task, trials, default)

    @contextlib.contextmanager
    def _reading(self, *limit_sec: float) -> Iterator[sa.Connection]:
        with self._guard("read"), connected(self._engine, *limit_sec) as connection:
            yield connection

    @contextlib.contextmanager
    def _writing(self, *limit_sec: float) -> Iterator[sa.Connection]:
        # Several threads may use SQLAlchemy's engine, only one a transaction.
        with self._lock, self._guard("write to"), transaction(self._engine, *limit_sec) as begun:
            yield begun

    def _read(
        self,
        table: sa.Table,
        ids: sa.Select[Any],
        n: int | None = None,
        *without: str,
        limit_sec: float = ANSWER_TIMEOUT_SEC,
    ) -> list[StoredTrial]:
        """Return the first ``n`` valid trials of a query for ids, without some columns."""
        if n is not None:
            ids = ids.limit(n + tables.MAX_BAD_ROWS)
        with self._reading(limit_sec) as connection, closing(connection.scalars(ids)) as numbers:
            found = self._valid.trials(connection, table, numbers, n, without=without)
        return [trial for _, trial in found]

    @contextlib.contextmanager
    def _guard(self, action: str) -> Iterator[None]:
        """Turn a database's exceptions into a StoreError with advice."""
        try:
            yield
        except (sa.exc.SQLAlchemyError, sqlite3.Error, OSError, ImportError, UnicodeError) as error:
            lines = str(getattr(error, "orig", None) or error).strip().splitlines()
            reason = scrubbed(lines[0] if lines else type(error).__name__, self.url)
            # A driver that encodes the text itself raises an error of Python's.
            is_refused = isinstance(error, sa.exc.DataError | UnicodeError)
            raise (StoreDataError if is_refused else StoreError)(
                f"Could not {action} the record store {self.name}: {reason}. {advice_on(reason)}"
            ) from error


def add_accepted(
    add: Callable[[StoredTask, Sequence[StoredTrial]], None],
    task: StoredTask,
    trials: Sequence[StoredTrial],
) -> list[StoreDataError]:
    """Add trials, or verdicts, but those that a store refuses for their content.

    Returns its error for each of those.
    """
    refused: list[StoreDataError] = []
    pieces = [trials]
    while pieces:
        piece = pieces.pop()
        try:
            add(task, piece)
        except StoreDataError as error:
            if len(piece) <= 1:
                refused += [error for _ in piece]
                continue
            # What is refused takes the other rows of its transaction with it.
            half = len(piece) // 2
            pieces += [piece[half:], piece[:half]]
    if refused:
        logger.warning("%s %d rows of %s are left out.", refused[0], len(refused), task.name)
    return refused


@contextlib.contextmanager
def open_store(name: str, environment: Environment | None = None) -> Iterator[RecordStore | None]:
    """Open the store that a configuration names; None for no store, or a broken user store."""
    if name == NO_STORE:
        yield None
        return
    try:
        store = RecordStore(resolve_url(name), environment)
    except StoreError as error:
        if name != USER_STORE:
            raise
        logger.warning("%s The run continues without it.", error)
        yield None
        return
    with store:
        yield store


def redacted_name(name: str, store: RecordStore | None) -> str:
    """Return a store's name for a journal, never with a password."""
    if name == USER_STORE or name.startswith(FROM_ENVIRONMENT):
        return name
    if store is None:
        return NO_STORE
    database = store.url.database or ""
    is_file = store.url.get_backend_name() == "sqlite" and database not in ("", ":memory:")
    # A resumed run may begin in another directory.
    return str(Path(database).resolve()) if is_file else store.name
