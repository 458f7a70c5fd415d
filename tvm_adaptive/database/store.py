"""The record store: what was ever measured, kept across runs and shared between people.

A SQLite file by default, in write-ahead mode, so that several runs may write at once and
a killed one leaves no half of a batch; PostgreSQL by URL for a team. What ``add`` has
returned from is on disk. What is read may have been written by anybody: rows that are no
records are left out and counted (:mod:`tvm_adaptive.database.rows`).
"""

from __future__ import annotations

import contextlib
import copy
import math
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tvm_adaptive.database import schema
from tvm_adaptive.database.engine import (
    LONG_ANSWER_TIMEOUT_SEC,
    MOUNTINFO,
    advice_on,
    connected,
    engine_of,
    transaction,
)
from tvm_adaptive.database.reading import (
    MAX_BAD_ROWS,
    GoodRows,
    ids_of,
    is_from,
    is_task,
    is_timed,
    spread_out,
)
from tvm_adaptive.database.records import StoredTask, StoredTrial, TaskStats
from tvm_adaptive.database.rows import task_of_row
from tvm_adaptive.database.upgrade import prepare
from tvm_adaptive.database.url import displayed, scrubbed, url_of
from tvm_adaptive.database.writing import append, delete, delete_all_but
from tvm_adaptive.errors import StoreError
from tvm_adaptive.workers.environment import UNKNOWN, Environment

# The latest that any calendar can show.
_LAST_UNIX_SEC = 1e11


class RecordStore:
    """Trials by task, appended and asked for.

    Every wait has a bound: a database that hangs is an error after some seconds.

    Parameters
    ----------
    url : str or Path
        A path of a SQLite file, created if missing, or a URL as SQLAlchemy takes it,
        such as ``"postgresql+psycopg://user:secret@host/name"``. A store of an older format
        is brought to the present one.
    environment : Environment or None, default None
        Where its user measures; see :meth:`at`.
    mountinfo : Path
        What is mounted where, as Linux writes it: on a network file system a SQLite file is
        not written in write-ahead mode.

    Attributes
    ----------
    url : URL
    environment : Environment or None

    Raises
    ------
    StoreError
        When the file is no store, is damaged or of a newer version, or the server cannot
        be reached; what is there is left as it is.
    """

    def __init__(
        self,
        url: str | Path,
        environment: Environment | None = None,
        *,
        mountinfo: Path = MOUNTINFO,
    ) -> None:
        self.url = url_of(url)
        self.environment = environment
        with self._guard("open"):
            if self.url.get_backend_name() == "sqlite" and self.url.database:
                Path(self.url.database).parent.mkdir(parents=True, exist_ok=True)
            self._engine = engine_of(self.url, mountinfo)
        # SQLAlchemy's engine may be used by several threads, a transaction by one.
        self._lock = threading.Lock()
        self._good = GoodRows()
        with self._guard("open"):
            prepare(self._engine, self.name)

    def at(self, environment: Environment | None) -> RecordStore:
        """Return the same store as it serves one who measures in an environment.

        Times of another device or another TVM cannot be compared with those there. So what
        was measured elsewhere is told only where ``elsewhere`` asks for it, apart from what a
        play-off found out: a wrong result is wrong everywhere. What is added, and does not
        say where it was measured, was measured there.

        Parameters
        ----------
        environment : Environment or None
            None for one who looks at all that there is.

        Returns
        -------
        RecordStore
            With the same connections, which are closed once.
        """
        bound = copy.copy(self)
        bound.environment = environment
        return bound

    @property
    def name(self) -> str:
        """What to call the store in a message; without a password."""
        return displayed(self.url)

    @property
    def n_left_out(self) -> int:
        """Rows that were asked for and are no records."""
        return self._good.n_left_out

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

    def tasks(
        self,
        *,
        family: str | None = None,
        target: str | None = None,
        newest: int | None = None,
    ) -> list[StoredTask]:
        """Return the tasks of a family, on a target, or all, in the order they came.

        Parameters
        ----------
        family, target : str or None, default None
        newest : int or None, default None
            Only so many of those that have a trial, the last that came.

        Raises
        ------
        StoreError
        """
        tasks = schema.tasks.c
        query = sa.select(tasks.id).order_by(tasks.id if newest is None else tasks.id.desc())
        if family is not None:
            query = query.where(tasks.family == family)
        if target is not None:
            query = query.where(tasks.target == target)
        if newest is not None:
            has_trial = sa.exists().where(schema.trials.c.task_id == tasks.id)
            query = query.where(has_trial).limit(newest + MAX_BAD_ROWS)
        with self._guard("read"), connected(self._engine) as connection:
            ids = list(connection.scalars(query))
            found = self._good.tasks(connection, ids, newest)
        return found if newest is None else found[::-1]

    def best(
        self,
        task: StoredTask,
        n: int,
        *,
        without: Collection[str] = (),
        elsewhere: bool = False,
    ) -> list[StoredTrial]:
        """Return the ``n`` fastest trials of a task, fastest first, without features.

        Parameters
        ----------
        task : StoredTask
        n : int
        without : collection of str, default ()
            Runs whose trials are not asked for.
        elsewhere : bool, default False
            Only what was not measured in the store's environment: hints, not times.

        Raises
        ------
        StoreError
        """
        trials = schema.trials
        query = ids_of(trials, task).where(
            is_timed(trials),
            trials.c.run.not_in(without),
            *is_from(trials, self.environment, elsewhere),
        )
        query = query.order_by(trials.c.seconds, trials.c.id).limit(n + MAX_BAD_ROWS)
        return self._read(trials, query, n, without=("features",))

    def latest(
        self, task: StoredTask, n: int | None = None, *, with_record: bool = True
    ) -> list[StoredTrial]:
        """Return the last ``n`` trials of a task, or all, in the order measured.

        Parameters
        ----------
        task : StoredTask
        n : int or None, default None
        with_record : bool, default True
            Whether to read the records, too; without, these are empty.

        Raises
        ------
        StoreError
        """
        trials = schema.trials
        query = ids_of(trials, task).where(*is_from(trials, self.environment))
        query = query.order_by(trials.c.id.desc())
        query = query.limit(None if n is None else n + MAX_BAD_ROWS)
        return self._read(trials, query, n, without=() if with_record else ("record",))[::-1]

    def seconds(self, task: StoredTask, *, without: Collection[str] = ()) -> list[float]:
        """Return what each trial of a task took, in the order measured; NaN for a failure.

        Rows that are known to be no records are left out; this looks at no record itself.

        Parameters
        ----------
        task : StoredTask
        without : collection of str, default ()
            Runs whose trials are not asked for.

        Raises
        ------
        StoreError
        """
        trials = schema.trials
        query = sa.select(trials.c.id, trials.c.seconds).join_from(trials, schema.tasks)
        query = query.where(
            *is_task(task),
            trials.c.run.not_in(without),
            trials.c.seconds.is_(None) | is_timed(trials),
            *is_from(trials, self.environment),
        )
        with self._guard("read"), connected(self._engine) as connection:
            return [
                math.nan if seconds is None else float(seconds)
                for row_id, seconds in connection.execute(query.order_by(trials.c.id))
                if not self._good.is_bad(trials, row_id)
            ]

    def finals(self, task: StoredTask, *, elsewhere: bool = False) -> list[StoredTrial]:
        """Return what play-offs said of a task's candidates, in the order they were held.

        Seconds and their error are the play-off's; a failure says why a candidate must not
        be used. What to make of it: :mod:`tvm_adaptive.database.verdicts`.

        Parameters
        ----------
        task : StoredTask
        elsewhere : bool, default False
            Only those with a time that was not taken in the store's environment.

        Raises
        ------
        StoreError
        """
        finals = schema.finals
        there = is_from(finals, self.environment, elsewhere)
        is_told = sa.and_(sa.true(), *there)
        is_failure = finals.c.seconds.is_(None)
        is_asked_for = is_told & ~is_failure if elsewhere else is_told | is_failure
        newest = ids_of(finals, task).where(is_asked_for).order_by(finals.c.id.desc())
        return self._read(schema.finals, newest.limit(MAX_BAD_ROWS))[::-1]

    def sample(
        self,
        task: StoredTask,
        n: int,
        *,
        width: int | None = None,
        with_record: bool = True,
    ) -> list[StoredTrial]:
        """Return at most ``n`` trials of a task in the order measured: the best, and others.

        Half of them are the fastest, the others lie evenly over the task's whole history,
        failures included.

        Parameters
        ----------
        task : StoredTask
        n : int
        width : int or None, default None
            Only such with so many features; None for all.
        with_record : bool, default True
            Whether to read the records, too; without, these are empty.

        Raises
        ------
        StoreError
        """

        def is_wide(trial: StoredTrial) -> bool:
            return width is None or (trial.features is not None and len(trial.features) == width)

        trials, without = schema.trials, () if with_record else ("record",)
        options: dict[str, Any] = {"without": without, "wanted": is_wide}
        of_task = ids_of(trials, task).where(*is_from(trials, self.environment))
        if width is not None:
            of_task = of_task.where(trials.c.features.is_not(None))
        fastest = of_task.where(is_timed(trials)).order_by(trials.c.seconds, trials.c.id)
        with self._guard("read"), connected(self._engine) as connection:
            ids = list(connection.scalars(of_task.order_by(trials.c.id)))
            found: dict[int, StoredTrial] = {}
            if len(ids) > n:
                best = list(connection.scalars(fastest.limit(n // 2 + MAX_BAD_ROWS)))
                found.update(self._good.trials(connection, trials, best, n // 2, **options))
                ids = [row_id for row_id in spread_out(ids) if row_id not in found]
                ids = ids[: n + MAX_BAD_ROWS]
            rest = self._good.trials(connection, trials, ids, n - len(found), **options)
        found.update(rest)
        return [found[row_id] for row_id in sorted(found)]

    def after(self, row_id: int, n: int) -> list[tuple[int, StoredTask, StoredTrial]]:
        """Return the first ``n`` trials behind a row, each with its number, of all tasks.

        Parameters
        ----------
        row_id : int
            As :meth:`last_id` tells it; 0 for the beginning.
        n : int

        Raises
        ------
        StoreError
        """
        trials = schema.trials.c
        query = sa.select(trials.id, trials.task_id).where(trials.id > row_id)
        with self._guard("read"), connected(self._engine) as connection:
            query = query.order_by(trials.id).limit(n + MAX_BAD_ROWS)
            task_ids = {row.id: row.task_id for row in connection.execute(query)}
            rows = self._good.trials(connection, schema.trials, list(task_ids), n)
            wanted = sorted({task_ids[number] for number, _ in rows})
            found = connection.execute(sa.select(schema.tasks).where(schema.tasks.c.id.in_(wanted)))
            tasks = {row["id"]: task_of_row(row) for row in found.mappings()}
        return [
            (number, task, trial)
            for number, trial in rows
            if (task := tasks.get(task_ids[number])) is not None
        ]

    def last_id(self) -> int:
        """Return the number of the last trial; 0 without any.

        Raises
        ------
        StoreError
        """
        query = sa.select(sa.func.coalesce(sa.func.max(schema.trials.c.id), 0))
        with self._guard("read"), connected(self._engine) as connection:
            return int(connection.scalar(query) or 0)

    def stats(self) -> list[TaskStats]:
        """Return what there is, per task.

        Raises
        ------
        StoreError
        """
        trials = schema.trials
        timed = sa.case((is_timed(trials), trials.c.seconds))
        known = sa.case((trials.c.unix_sec.between(0.0, _LAST_UNIX_SEC), trials.c.unix_sec))
        query = sa.select(
            trials.c.task_id,
            sa.func.count(trials.c.id),
            sa.func.count(trials.c.seconds),
            sa.func.min(timed),
            sa.func.coalesce(sa.func.max(known), 0.0),
        )
        query = query.where(*is_from(trials, self.environment)).group_by(trials.c.task_id)
        with self._guard("read"), connected(self._engine) as connection:
            counts = {row[0]: row[1:] for row in connection.execute(query)}
            rows = connection.execute(sa.select(schema.tasks).order_by(schema.tasks.c.id))
            tasks = [(row["id"], task_of_row(row)) for row in rows.mappings()]
        return [
            TaskStats(
                task,
                n_trials,
                n_trials - n_successes,
                None if best_sec is None else float(best_sec),
                float(last),
            )
            for task_id, task in tasks
            if task is not None
            for n_trials, n_successes, best_sec, last in [counts.get(task_id, (0, 0, None, 0.0))]
        ]

    def prune(self, keep: int) -> int:
        """Keep the ``keep`` fastest trials of each task; return how many were deleted.

        That is of each device, whose times cannot be compared with another's. Of what
        play-offs said the newest ``keep`` of each task stay; what is no record goes. A file
        then becomes as small as what is left in it.

        Raises
        ------
        StoreError
            Nothing is deleted then.
        """
        trials, finals = schema.trials, schema.finals
        by_time = (trials.c.seconds.is_(None), trials.c.seconds, trials.c.id)
        groups = [trials.c.task_id, trials.c.environment_id]
        limit_sec = LONG_ANSWER_TIMEOUT_SEC
        with self._guard("read"), connected(self._engine, limit_sec) as connection:
            for table in (trials, finals):
                ids = list(connection.scalars(sa.select(table.c.id)))
                self._good.trials(connection, table, ids, wanted=lambda _: False)
        with (
            self._lock,
            self._guard("write to"),
            transaction(self._engine, limit_sec) as connection,
        ):
            n_deleted = delete(connection, trials, self._good.bad(trials))
            n_deleted += delete_all_but(connection, trials, keep, by_time, groups)
            delete(connection, finals, self._good.bad(finals))
            delete_all_but(connection, finals, keep, [finals.c.id.desc()], [finals.c.task_id])
        if self.url.get_backend_name() == "sqlite":
            with self._lock, self._guard("write to"), connected(self._engine) as connection:
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
        here = self.environment or UNKNOWN
        with self._lock, self._guard("write to"), transaction(self._engine) as connection:
            append(connection, table, task, trials, here)

    def _read(
        self,
        table: sa.Table,
        ids: sa.Select[Any],
        n: int | None = None,
        *,
        without: Collection[str] = (),
    ) -> list[StoredTrial]:
        """Return the first good ones of the rows that a query names."""
        with self._guard("read"), connected(self._engine) as connection:
            numbers = list(connection.scalars(ids))
            found = self._good.trials(connection, table, numbers, n, without=without)
        return [trial for _, trial in found]

    @contextlib.contextmanager
    def _guard(self, action: str) -> Iterator[None]:
        """Turn what a database may raise into an error of ours that says what to do."""
        try:
            yield
        except (sa.exc.SQLAlchemyError, sqlite3.Error, OSError, ImportError) as error:
            lines = str(getattr(error, "orig", None) or error).strip().splitlines()
            reason = scrubbed(lines[0] if lines else type(error).__name__, self.url)
            raise StoreError(
                f"Could not {action} the record store {self.name}: {reason}. {advice_on(reason)}"
            ) from error
