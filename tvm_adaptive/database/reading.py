"""Read a record store's rows in pages, and pass over those that are no records."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from tvm_adaptive.database import schema
from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.rows import (
    LEAST_SEC,
    MAX_FEATURE_BYTES,
    MAX_RECORD_CHARS,
    MAX_TEXT_CHARS,
    MAX_WORKLOAD_CHARS,
    MOST_SEC,
    task_of_row,
    trial_of_row,
)
from tvm_adaptive.workers.environment import Environment

# Rows that are asked for at once: their records are some megabytes together.
_PAGE_ROWS = 256
# Where bad rows come first, so many are looked at, for so long, before there are no good ones.
MAX_BAD_ROWS = 20_000
_MAX_READ_SEC = 5.0

Condition = sa.ColumnElement[bool]


class GoodRows:
    """Rows of one store that are what they should be; each bad one is looked at once."""

    def __init__(self) -> None:
        self._bad: dict[str, set[int]] = {}

    @property
    def n_left_out(self) -> int:
        """Bad rows that were met."""
        return sum(len(ids) for ids in self._bad.values())

    def is_bad(self, table: sa.Table, row_id: int) -> bool:
        """Say whether a row is known to be bad."""
        return row_id in self._bad.get(table.name, ())

    def bad(self, table: sa.Table) -> list[int]:
        """Return the numbers of a table's rows that are known to be bad."""
        return sorted(self._bad.get(table.name, ()))

    def trials(
        self,
        connection: sa.Connection,
        table: sa.Table,
        ids: Sequence[int],
        n: int | None = None,
        *,
        without: Collection[str] = (),
        wanted: Callable[[StoredTrial], bool] = lambda _: True,
    ) -> list[tuple[int, StoredTrial]]:
        """Return the first good rows of some, each with its number."""
        left_out = {"id", "task_id", "environment_id", *without}
        places = schema.environments.c
        query = sa.select(
            table.c.id,
            *(column for column in table.c if column.name not in left_out),
            *(column for column in places if column.name not in ("id", "key")),
        ).select_from(table.outerjoin(schema.environments))
        query = query.where(*_fits(table, without))
        found: list[tuple[int, StoredTrial]] = []
        for rows in self._pages(connection, table, query, ids, n):
            for row_id, row in rows:
                trial = trial_of_row(row)
                if trial is None:
                    self._note(table, row_id)
                elif wanted(trial):
                    found.append((row_id, trial))
                if len(found) == n:
                    return found
        return found

    def tasks(
        self, connection: sa.Connection, ids: Sequence[int], n: int | None = None
    ) -> list[StoredTask]:
        """Return the first good tasks of some; of all with None."""
        found: list[StoredTask] = []
        query = sa.select(schema.tasks).where(*_fits(schema.tasks))
        for rows in self._pages(connection, schema.tasks, query, ids, n):
            for row_id, row in rows:
                task = task_of_row(row)
                if task is None:
                    self._note(schema.tasks, row_id)
                else:
                    found.append(task)
                if len(found) == n:
                    return found
        return found

    def _pages(
        self,
        connection: sa.Connection,
        table: sa.Table,
        query: sa.Select[Any],
        ids: Sequence[int],
        n: int | None,
    ) -> Iterator[list[tuple[int, Any]]]:
        """Yield rows by their numbers, in their order, but for those that are known to be bad."""
        end_sec = time.monotonic() + _MAX_READ_SEC
        left = [row_id for row_id in ids if not self.is_bad(table, row_id)]
        # Mostly all are good: then no more rows are read than are asked for.
        size = _PAGE_ROWS if n is None else min(n, _PAGE_ROWS)
        start = 0
        while start < len(left) and (n is None or time.monotonic() < end_sec):
            page = left[start : start + size]
            found = {
                int(row["id"]): row
                for row in connection.execute(query.where(table.c.id.in_(page))).mappings()
            }
            for row_id in page:
                if row_id not in found:  # too long to be read
                    self._note(table, row_id)
            yield [(row_id, found[row_id]) for row_id in page if row_id in found]
            start, size = start + size, _PAGE_ROWS

    def _note(self, table: sa.Table, row_id: int) -> None:
        self._bad.setdefault(table.name, set()).add(row_id)


def _fits(table: sa.Table, without: Collection[str] = ()) -> Iterable[Condition]:
    """Yield what keeps texts out that are too long to be looked at."""
    limits = {
        "record": MAX_RECORD_CHARS,
        "features": MAX_FEATURE_BYTES,
        "workload": MAX_WORKLOAD_CHARS,
    }
    for column in table.c:
        if column.name not in without and isinstance(column.type, sa.String | sa.LargeBinary):
            limit = limits.get(column.name, MAX_TEXT_CHARS)
            yield sa.func.coalesce(sa.func.length(column), 0) <= limit


def is_task(task: StoredTask) -> tuple[Condition, ...]:
    """Return the conditions of being a task's row."""
    columns = schema.tasks.c
    return (columns.workload_key == task.workload_key, columns.target_key == task.target_key)


def is_timed(table: sa.Table) -> Condition:
    """Return the condition of having a time that something can take."""
    return table.c.seconds.between(LEAST_SEC, MOST_SEC)


def is_from(
    table: sa.Table, environment: Environment | None, elsewhere: bool = False
) -> tuple[Condition, ...]:
    """Return the conditions of having been measured in an environment."""
    if environment is None or not environment.is_known:
        is_anywhere = environment is None
        return () if is_anywhere is not elsewhere else (sa.false(),)
    columns = schema.environments.c
    same = sa.select(columns.id).where(
        columns.device == environment.device,
        columns.tvm == environment.tvm,
        columns.tvm_ffi == environment.tvm_ffi,
    )
    own = table.c.environment_id
    return (own.is_(None) | own.not_in(same),) if elsewhere else (own.in_(same),)


def spread_out(values: Sequence[int]) -> list[int]:
    """Return values in an order whose beginning lies evenly over them, however long it is.

    The last and the first come first, then the middle, the quarters, the eighths, ...
    """
    n = len(values)
    n_bits = max(1, (n - 1).bit_length())
    mirrored = (int(f"{i:0{n_bits}b}"[::-1], 2) for i in range(1 << n_bits))
    places = dict.fromkeys([max(0, n - 1), *(place for place in mirrored if place < n)])
    return [values[place] for place in places if place < n]


def ids_of(table: sa.Table, task: StoredTask) -> sa.Select[Any]:
    """Return the question for the numbers of a task's rows."""
    return sa.select(table.c.id).join_from(table, schema.tasks).where(*is_task(task))
