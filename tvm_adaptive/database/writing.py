"""Append rows to a record store's tables, inside a transaction of the caller's."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from tvm_adaptive.database import schema
from tvm_adaptive.database.engine import INSERTS
from tvm_adaptive.database.reading import is_task
from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.rows import row_of
from tvm_adaptive.workers.environment import Environment

# Rows that are deleted with one statement; databases limit its length.
_DELETED_AT_ONCE = 500


def append(
    connection: sa.Connection,
    table: sa.Table,
    task: StoredTask,
    trials: Sequence[StoredTrial],
    here: Environment,
) -> None:
    """Append what a table has columns for."""
    task_id = _task_id(connection, task)
    places = [each.environment if each.environment.is_known else here for each in trials]
    numbers = {place: _environment_id(connection, place) for place in set(places)}
    rows = [
        {
            **{key: value for key, value in row_of(trial).items() if key in table.c},
            "task_id": task_id,
            "environment_id": numbers[place],
        }
        for trial, place in zip(trials, places, strict=True)
    ]
    if rows:
        connection.execute(sa.insert(table), rows)


def delete(connection: sa.Connection, table: sa.Table, ids: Sequence[int]) -> int:
    """Delete rows by their numbers; return how many there were."""
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
    """Delete all rows of each group but the first few by an order; return how many."""
    rank = sa.func.row_number().over(partition_by=tuple(groups), order_by=tuple(order))
    ranked = sa.select(table.c.id, rank.label("rank")).subquery()
    gone = sa.select(ranked.c.id).where(ranked.c.rank > keep)
    return int(connection.execute(sa.delete(table).where(table.c.id.in_(gone))).rowcount)


def _task_id(connection: sa.Connection, task: StoredTask) -> int:
    values = {**dataclasses.asdict(task), "target_key": task.target_key}
    _insert_unless_there(connection, schema.tasks, values)
    query = sa.select(schema.tasks.c.id).where(*is_task(task))
    return int(connection.execute(query).scalar_one())


def _environment_id(connection: sa.Connection, environment: Environment) -> int | None:
    if not environment.is_known:
        return None
    fields = environment.as_fields()
    key = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    _insert_unless_there(connection, schema.environments, {"key": key, **fields})
    places = schema.environments.c
    return int(connection.execute(sa.select(places.id).where(places.key == key)).scalar_one())


def _insert_unless_there(
    connection: sa.Connection, table: sa.Table, values: dict[str, Any]
) -> None:
    insert = INSERTS[connection.dialect.name]
    connection.execute(insert(table).values(**values).on_conflict_do_nothing())
