"""Read, append and delete rows of a record store's tables.

Reading goes page by page and passes over rows that are not valid records.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from tvm_adaptive.database import records, schema
from tvm_adaptive.database.engine import INSERTS
from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.workers.environment import Environment

# Rows per query: their records take some megabytes together.
_PAGE_ROWS = 256
# Invalid rows that a query for n valid ones looks at before it gives up, and for how long.
MAX_BAD_ROWS = 20_000
_MAX_READ_SEC = 5.0
# Rows per DELETE statement; databases limit its length.
_DELETED_AT_ONCE = 500

Condition = sa.ColumnElement[bool]
_Value = TypeVar("_Value", StoredTask, StoredTrial)


class ValidRows:
    """The valid rows of one store; it reads each invalid row only once."""

    def __init__(self) -> None:
        self._bad: defaultdict[str, set[int]] = defaultdict(set)  # ids by table

    @property
    def n_left_out(self) -> int:
        """Invalid rows found so far."""
        return sum(len(ids) for ids in self._bad.values())

    def forget(self) -> None:
        """Forget which rows are invalid: their ids may be given to others."""
        self._bad.clear()

    def bad(self, table: sa.Table) -> list[int]:
        """Return the ids of a table's rows that are known to be invalid."""
        return sorted(self._bad[table.name])

    def trials(
        self,
        connection: sa.Connection,
        table: sa.Table,
        ids: Iterable[int],
        n: int | None = None,
        *,
        without: Collection[str] = (),
        wanted: Callable[[StoredTrial], bool] = lambda _: True,
    ) -> list[tuple[int, StoredTrial]]:
        """Return the first ``n`` valid and wanted rows, each with its id."""
        left_out = {"id", "task_id", "environment_id", *without}
        query = sa.select(
            table.c.id,
            *(column for column in table.c if column.name not in left_out),
            *(column for column in schema.environments.c if column.name not in ("id", "key")),
        ).select_from(table.outerjoin(schema.environments))
        query = query.where(*_has_short_texts(table, without))
        return self._first(
            connection, table, query, ids, n, parse=records.trial_of_row, wanted=wanted
        )

    def tasks(
        self,
        connection: sa.Connection,
        ids: Iterable[int],
        n: int | None = None,
        *,
        without: Collection[str] = (),
        wanted: Callable[[StoredTask], bool] = lambda _: True,
    ) -> list[StoredTask]:
        """Return the first ``n`` valid and wanted tasks, without some columns."""
        columns = (column for column in schema.tasks.c if column.name not in without)
        query = sa.select(*columns).where(*_has_short_texts(schema.tasks, without))
        found = self._first(
            connection, schema.tasks, query, ids, n, parse=records.task_of_row, wanted=wanted
        )
        return [task for _, task in found]

    def _first(
        self,
        connection: sa.Connection,
        table: sa.Table,
        query: sa.Select[Any],
        ids: Iterable[int],
        n: int | None,
        *,
        parse: Callable[[Mapping[Any, Any]], _Value | None],
        wanted: Callable[[_Value], bool] = lambda _: True,
    ) -> list[tuple[int, _Value]]:
        """Return the first ``n`` valid and wanted rows in the order of ``ids``."""
        end_sec = time.monotonic() + _MAX_READ_SEC
        bad = self._bad[table.name]
        # A database finds the first few of thousands of ids much sooner than all.
        left = (row_id for row_id in ids if row_id not in bad)
        found: list[tuple[int, _Value]] = []
        # Nearly all rows are valid: the first page holds as many as are wanted.
        size = _PAGE_ROWS if n is None else min(n, _PAGE_ROWS)
        while len(found) != n and (n is None or time.monotonic() < end_sec):
            page = list(itertools.islice(left, size))
            if not page:
                break
            rows = connection.execute(query.where(table.c.id.in_(page))).mappings()
            row_of_id = {int(row["id"]): row for row in rows}
            if missing := set(page) - set(row_of_id):
                # Their texts are too long, unless another process has deleted them.
                there = sa.select(table.c.id).where(table.c.id.in_(missing))
                bad.update(map(int, connection.scalars(there)))
            for row_id in page:
                if row_id not in row_of_id:
                    continue
                value = parse(row_of_id[row_id])
                if value is None:
                    bad.add(row_id)
                elif wanted(value):
                    found.append((row_id, value))
                if len(found) == n:
                    break
            size = _PAGE_ROWS
        return found


def _has_short_texts(table: sa.Table, without: Collection[str] = ()) -> Iterable[Condition]:
    """Yield conditions that exclude texts too long to be read."""
    limits = {
        "record": records.MAX_RECORD_CHARS,
        "features": records.MAX_FEATURE_BYTES,
        "workload": records.MAX_WORKLOAD_CHARS,
    }
    for column in table.c:
        if column.name not in without and isinstance(column.type, sa.String | sa.LargeBinary):
            limit = limits.get(column.name, records.MAX_TEXT_CHARS)
            yield sa.func.coalesce(sa.func.length(column), 0) <= limit


def is_task(task: StoredTask) -> tuple[Condition, ...]:
    """Return the conditions that select a task's row."""
    columns = schema.tasks.c
    return (columns.workload_key == task.workload_key, columns.target_key == task.target_key)


def is_timed(table: sa.Table) -> Condition:
    """Return the condition that a row has a plausible time."""
    return table.c.seconds.between(records.MIN_SEC, records.MAX_SEC)


def is_from(
    table: sa.Table, environment: Environment | None, elsewhere: bool = False
) -> tuple[Condition, ...]:
    """Return the conditions that a row was measured in an environment; None selects all."""
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


def ids_of(table: sa.Table, task: StoredTask) -> sa.Select[Any]:
    """Return the query for the ids of a task's rows."""
    return sa.select(table.c.id).join_from(table, schema.tasks).where(*is_task(task))


def spread_out(values: Sequence[int]) -> list[int]:
    """Return values in an order of which every prefix lies evenly over them.

    The last and the first come first, then the middle, the quarters, the eighths, ...
    """
    n = len(values)
    n_bits = max(1, (n - 1).bit_length())
    mirrored = (int(f"{i:0{n_bits}b}"[::-1], 2) for i in range(1 << n_bits))
    indices = dict.fromkeys([max(0, n - 1), *mirrored])
    return [values[i] for i in indices if i < n]


def append(
    connection: sa.Connection,
    table: sa.Table,
    task: StoredTask,
    trials: Sequence[StoredTrial],
    default: Environment,
) -> None:
    """Append trials, those of an unknown environment as of the default one."""
    task_id = _task_id(connection, task)
    environments = [each.environment if each.environment.is_known else default for each in trials]
    ids = {each: _environment_id(connection, each) for each in set(environments)}
    rows = [
        {
            **{key: value for key, value in records.row_of(trial).items() if key in table.c},
            "task_id": task_id,
            "environment_id": ids[environment],
        }
        for trial, environment in zip(trials, environments, strict=True)
    ]
    if rows:
        connection.execute(sa.insert(table), rows)


def insert_if_missing(connection: sa.Connection, table: sa.Table, values: dict[str, Any]) -> None:
    """Insert a row unless one with the same key is there."""
    insert = INSERTS[connection.dialect.name]
    connection.execute(insert(table).values(**values).on_conflict_do_nothing())


def delete(connection: sa.Connection, table: sa.Table, ids: Sequence[int]) -> int:
    """Delete rows by their ids; return how many there were."""
    n_deleted = 0
    for start in range(0, len(ids), _DELETED_AT_ONCE):
        gone = table.c.id.in_(ids[start : start + _DELETED_AT_ONCE])
        n_deleted += int(connection.execute(sa.delete(table).where(gone)).rowcount)
    return n_deleted


def delete_all_but(
    connection: sa.Connection,
    table: sa.Table,
    keep: int,
    order: Sequence[sa.ColumnElement[Any]],
    groups: Sequence[sa.ColumnElement[Any]],
) -> int:
    """Keep the first ``keep`` rows of each group; return how many were deleted."""
    rank = sa.func.row_number().over(partition_by=tuple(groups), order_by=tuple(order))
    joined = table.outerjoin(schema.environments)
    ranked = sa.select(table.c.id, rank.label("rank")).select_from(joined).subquery()
    gone = sa.select(ranked.c.id).where(ranked.c.rank > keep)
    return int(connection.execute(sa.delete(table).where(table.c.id.in_(gone))).rowcount)


def _task_id(connection: sa.Connection, task: StoredTask) -> int:
    values = {**dataclasses.asdict(task), "target_key": task.target_key}
    insert_if_missing(connection, schema.tasks, values)
    query = sa.select(schema.tasks.c.id).where(*is_task(task))
    return int(connection.execute(query).scalar_one())


def _environment_id(connection: sa.Connection, environment: Environment) -> int | None:
    if not environment.is_known:
        return None
    fields = environment.as_fields()
    key = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    insert_if_missing(connection, schema.environments, {"key": key, **fields})
    columns = schema.environments.c
    return int(connection.execute(sa.select(columns.id).where(columns.key == key)).scalar_one())
