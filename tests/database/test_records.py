"""Rows are data: each that is no record is left out, whatever is in it, and no other."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from tests.database.test_store import record, task, trial
from tvm_adaptive.database import records as rules
from tvm_adaptive.database import schema
from tvm_adaptive.database.records import (
    is_record,
    pack_features,
    task_of_row,
    trial_of_row,
    unpack_features,
)
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.search_strategy.transfer import transfer_record_of
from tvm_adaptive.values.trace_json import is_sane

GOOD: dict[str, Any] = {
    "record": record(),
    "seconds": 1e-3,
    "error": 0.1,
    "failure": "",
    "features": pack_features(np.ones(5, dtype=np.float32)),
    "unix_sec": 1.7e9,
    "run": "run",
}
BOMB = zlib.compress(bytes(64 << 20), level=9)


def tile(*parts: Any, kind: str = "SamplePerfectTile") -> str:
    """Return a record of one loop that is split."""
    trace = [[[kind, ["l1"], [len(parts), 64], ["v1"]]], [[0, list(parts)]]]
    return json.dumps([trace, [1.0]])


def test_a_good_row_is_a_trial() -> None:
    found = trial_of_row(GOOD)
    assert found is not None
    assert (found.seconds, found.error, found.run) == (1e-3, 0.1, "run")
    assert found.features is not None
    assert trial_of_row({**GOOD, "record": tile(2, 32)}) is not None
    assert trial_of_row({**GOOD, "seconds": None, "error": None}) is not None


HOSTILE = [
    *({"record": text} for text in ("", "[", "{}", "[]", "null", "[[[1]]]", "x" * 300)),
    *({"record": record()[:-cut]} for cut in (1, 3)),
    {"record": "[" * 100_000},
    {"record": "[" * 500 + "]" * 500},
    {"record": json.dumps([[[], []], "x" * rules.MAX_RECORD_CHARS])},
    *({"record": f"[[[],[]],[{number}]]"} for number in ("Infinity", "-Infinity", "NaN", "1e999")),
    *({"record": tile(*parts)} for parts in ((0, 64), (-1, 64), (2.5, 2), ("2", 32), (2**40, 1))),
    {"record": tile(0, 4, kind="SamplePartitionedTile")},
    {"record": json.dumps([[[["Split", [], [], []]], [[7, 0]]]])},
    {"record": json.dumps([[[["Split", [], [], []]], [[-1, 0]]]])},
    {"record": json.dumps([[[["Split"]], []]])},
    *({"seconds": sec} for sec in (0.0, -1.0, float("inf"), float("nan"), 1e-300, 1e300, "1")),
    *({"error": error} for error in (-0.1, float("inf"), float("nan"), "0")),
    *({"unix_sec": sec} for sec in (float("inf"), float("nan"), None)),
    *({name: None} for name in ("record", "failure", "run")),
    *({name: "x" * (rules.MAX_TEXT_CHARS + 1)} for name in ("failure", "run")),
    {"record": b"[[[],[]]]"},
]


@pytest.mark.parametrize("fields", HOSTILE, ids=lambda fields: str(fields)[:40])
def test_a_row_that_is_no_record_is_none(fields: dict[str, Any]) -> None:
    assert trial_of_row({**GOOD, **fields}) is None


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no zlib",
        BOMB,
        pack_features(np.ones(5, dtype=np.float32))[:-2],  # type: ignore[index]
        zlib.compress(b"12345"),
        pack_features(np.array([1.0, np.nan], dtype=np.float32)),
        pack_features(np.zeros(1 << 20, dtype=np.float32)),
        "text",
        10**12,
    ],
    ids=range(9),
)
def test_bad_features_cost_the_features_only(packed: Any) -> None:
    assert unpack_features(packed) is None
    found = trial_of_row({**GOOD, "features": packed})
    assert found is not None
    assert found.features is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
)


@given(JSON)
def test_whatever_a_record_holds_nothing_raises(value: Any) -> None:
    assert is_record(value) in (True, False)
    assert is_sane(value) in (True, False)
    trial_of_row({**GOOD, "record": json.dumps(value)})
    transfer_record_of([value], 1.0)


def test_a_record_of_thousands_of_levels_is_no_finding() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    record = [[[["Split", [], deep, []]], []]]
    assert is_record(record)
    assert transfer_record_of(record, 1.0) is None


@pytest.mark.parametrize(
    ("instruction", "decision"),
    [
        (["SamplePerfectTile", ["l1"], [2, 64], ["v1", "v2"]], [0, 64]),
        (["SamplePerfectTile", ["l1"], [2, 64], ["v1", "v2"]], [2**30, 2**30]),
        (["SamplePerfectTile", ["l1"], [2, 64], ["v1", "v2"]], [float("inf"), 1]),
        (["SamplePerfectTile", ["l1"], [2, 64], ["v1", "v2"]], []),
        (["SampleCategorical", [], [[0, 1], [0.5, 0.5]], ["v1"]], 2),
        (["SampleCategorical", [], [[0, 1], [0.5, 0.5]], ["v1"]], -1),
    ],
)
def test_decisions_that_no_knob_has_are_no_finding(instruction: list[Any], decision: Any) -> None:
    assert transfer_record_of([[[instruction], [[0, decision]]]], 1.0) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"target": "{"},
        {"target": "[" * 100_000},
        {"target": "[]"},
        {"target": '{"kind": Infinity}'},
        {"workload": "nothing"},
        {"name": "x" * (rules.MAX_TEXT_CHARS + 1)},
        {"family": None},
        {"workload_key": 7},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_a_task_that_is_none_is_none(fields: dict[str, Any]) -> None:
    good = {"name": "n", "family": "f", "workload": "[]", "workload_key": "0", "target": "{}"}
    assert task_of_row(good) is not None
    assert task_of_row({**good, **fields}) is None


def test_a_task_may_be_read_without_its_workload() -> None:
    row = {"name": "n", "family": "f", "workload_key": "0", "target": "{}"}
    found = task_of_row(row)
    assert found is not None
    assert found.workload == ""
    assert task_of_row({**row, "target": "[]"}) is None


def write_raw(store: RecordStore, **values: Any) -> None:
    """Write to the first task's trials what our own code would not."""
    row = {**GOOD, "task_id": 1, **values}
    names = ", ".join(row)
    marks = ", ".join(f":{name}" for name in row)
    with store._engine.begin() as connection:
        query = sa.text(f"INSERT INTO {schema.trials.name} ({names}) VALUES ({marks})")
        connection.execute(query, row)


@pytest.mark.parametrize(
    "fields",
    [
        {"record": "[" * 50_000},
        {"record": "[[[],[]]"},
        {"seconds": float("inf")},
        {"seconds": float("nan")},
        {"seconds": -1.0},
        {"seconds": 1e-200},
        {"error": -1.0, "seconds": 1e-9},
        {"unix_sec": float("inf")},
        {"run": "x" * 100_000},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_one_bad_row_costs_that_row(url: str, fields: dict[str, Any]) -> None:
    if "://" not in url and math.isnan(fields.get("seconds", 0.0)):
        pytest.skip("SQLite keeps no NaN")
    with RecordStore(url) as store:
        store.add(task(), [trial(1.0), trial(2.0)])
        write_raw(store, **fields)
        store.add(task(), [trial(3.0)])
        assert [each.seconds for each in store.latest(task())] == [1.0, 2.0, 3.0]
        assert [each.seconds for each in store.best(task(), 3)] == [1.0, 2.0, 3.0]
        assert len(store.sample(task(), 3)) == 3
        assert store.seconds(task()) == [1.0, 2.0, 3.0]
        assert len(store.stats()) == 1
        assert store.n_left_out == 1
        # It is the fastest, which stay; but it is no record.
        assert store.prune(2) == 2
        assert [each.seconds for each in store.latest(task())] == [1.0, 2.0]


def test_a_row_that_gets_the_number_of_a_bad_one_is_none(url: str) -> None:
    with RecordStore(url) as store:
        store.add(task(), [trial(1.0), trial(2.0)])
        write_raw(store, seconds=-1.0)
        assert store.prune(9) == 1
        store.add(task(), [trial(3.0)])
        assert [each.seconds for each in store.latest(task())] == [1.0, 2.0, 3.0]
        assert store.prune(9) == 0


def test_a_task_that_is_none_is_deleted_with_its_trials(url: str) -> None:
    with RecordStore(url) as store:
        store.add(task(), [trial(1.0)])
        with store._engine.begin() as connection:
            query = f"UPDATE {schema.tasks.name} SET workload = 'nothing'"
            connection.execute(sa.text(query))
        assert store.tasks() == []
        assert store.n_left_out == 1
        store.prune(9)
    with RecordStore(url) as store:
        assert store.tasks() == []
        assert store.n_left_out == 0
        store.add(task(), [trial(2.0)])
        assert store.seconds(task()) == [2.0]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("record", "CAST(x'5b5bff5d' AS TEXT)"),
        ("record", "x'00ff'"),
        ("record", "7"),
        ("seconds", "'soon'"),
        ("seconds", "x'00'"),
        ("error", "'little'"),
        ("unix_sec", "'today'"),
        ("failure", "CAST(x'ff' AS BLOB)"),
        ("run", "12.5"),
    ],
)
def test_sqlite_takes_any_type_in_any_column(tmp_path: Path, column: str, value: str) -> None:
    with RecordStore(tmp_path / "records.db") as store:
        store.add(task(), [trial(1.0), trial(2.0, unix_sec=9.0)])
        with store._engine.begin() as connection:
            connection.exec_driver_sql(
                f"UPDATE tvm_adaptive_trials SET {column} = {value} WHERE id = 1"
            )
        assert [each.seconds for each in store.latest(task()) if each.unix_sec == 9.0] == [2.0]
        assert len(store.best(task(), 9)) <= 2
        assert len(store.sample(task(), 9)) <= 2
        assert len(store.seconds(task())) <= 2
        assert len(store.stats()) == 1


@pytest.mark.parametrize("value", ["'text'", "7", "zeroblob(100000000)", "x'00'"])
def test_sqlite_takes_anything_for_features(tmp_path: Path, value: str) -> None:
    with RecordStore(tmp_path / "records.db") as store:
        store.add(task(), [trial(1.0), trial(2.0)])
        with store._engine.begin() as connection:
            connection.exec_driver_sql(
                f"UPDATE tvm_adaptive_trials SET features = {value} WHERE id = 1"
            )
        assert [each.seconds for each in store.best(task(), 9)] == [1.0, 2.0]
        assert store.latest(task())[-1].seconds == 2.0


def test_a_task_whose_row_is_bad_costs_that_task(url: str) -> None:
    with RecordStore(url) as store:
        store.add(task(), [trial(1.0)])
        store.add(task(1), [trial(1.0)])
        with store._engine.begin() as connection:
            connection.exec_driver_sql(
                "UPDATE tvm_adaptive_tasks SET target = '[[[' WHERE name = 'matmul0'"
            )
        assert store.tasks() == [task(1)]
        assert store.tasks(family="matmul", newest=5) == [task(1)]
        assert [each.task for each in store.stats()] == [dataclasses.replace(task(1), workload="")]
