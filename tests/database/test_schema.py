"""Stores of each earlier format, as they were written then."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.database.conftest import drop_all
from tvm_adaptive.cli import main
from tvm_adaptive.database import schema
from tvm_adaptive.database.maintenance import import_records
from tvm_adaptive.database.records import StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import StoreError
from tvm_adaptive.workers.environment import UNKNOWN, Environment

HERE = Environment("this processor, 2 cores", "0.27.0", "0.1.14")
_FOLDER = Path(__file__).parent
_TABLES = ("meta", "tasks", "trials", "finals")


def write_first_format(path: Path, *, with_finals: bool = True) -> None:
    with sqlite3.connect(path) as connection:
        connection.executescript((_FOLDER / "schema_v1.sql").read_text())
        if not with_finals:
            connection.execute("DROP TABLE tvm_adaptive_finals")


def write_first_format_to_server(url: str, folder: Path) -> None:
    write_first_format(folder / "v1.db")
    engine = sa.create_engine(url)
    with engine.begin() as server, sqlite3.connect(folder / "v1.db") as file:
        for statement in (_FOLDER / "schema_v1_postgresql.sql").read_text().split(";\n"):
            if statement.strip():
                server.exec_driver_sql(statement)
        for name in _TABLES:
            cursor = file.execute(f"SELECT * FROM tvm_adaptive_{name}")
            names = [column[0] for column in cursor.description]
            query = f"INSERT INTO tvm_adaptive_{name} VALUES ({', '.join(f':{n}' for n in names)})"
            for row in cursor:
                server.execute(sa.text(query), dict(zip(names, row, strict=True)))
            if name != "meta":
                sequence = f"SELECT setval('tvm_adaptive_{name}_id_seq', 100)"
                server.exec_driver_sql(sequence)
    engine.dispose()


@pytest.fixture(params=["sqlite", "sqlite without finals", "postgres"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return where a store of the first format is."""
    if request.param != "postgres":
        path = tmp_path / "records.db"
        write_first_format(path, with_finals=request.param == "sqlite")
        yield str(path)
        return
    url = request.getfixturevalue("postgres")
    drop_all(url)
    write_first_format_to_server(url, tmp_path)
    yield url
    drop_all(url)


def described(url: str) -> dict[str, object]:
    """Return tables and columns, their types as far as they matter."""
    engine = sa.create_engine(url if "://" in url else f"sqlite:///{url}")
    inspector = sa.inspect(engine)
    found: dict[str, object] = {}
    for table in sorted(schema.metadata.tables):
        columns = {each["name"]: each for each in inspector.get_columns(table)}
        found[table] = {
            name: (each["nullable"], "" if "://" not in url else str(each["type"]))
            for name, each in columns.items()
        }
        found[f"keys of {table}"] = sorted(
            (tuple(key["constrained_columns"]), key["referred_table"])
            for key in inspector.get_foreign_keys(table)
        )
        found[f"indexes of {table}"] = sorted(
            tuple(index["column_names"])
            for index in inspector.get_indexes(table)
            if not index["unique"]
        )
    engine.dispose()
    return found


def test_an_old_store_becomes_what_a_new_one_is(old: str, tmp_path: Path) -> None:
    RecordStore(old).close()
    upgraded = described(old)
    if "://" in old:
        drop_all(old)
        fresh = old
    else:
        fresh = str(tmp_path / "fresh.db")
    RecordStore(fresh).close()
    assert upgraded == described(fresh)


def test_nothing_is_lost_and_what_was_there_is_a_hint(old: str) -> None:
    with RecordStore(old) as store:
        first, second = store.tasks()
        trials = store.latest(first)
        assert [each.seconds for each in trials] == [3e-3, None, 1e-3]
        assert [each.environment for each in trials] == [UNKNOWN] * 3
        assert trials[1].failure == "Boom: it crashed"
        assert trials[2].features is not None
        assert trials[2].features.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
        assert (trials[2].error, trials[2].run) == (0.02, "17a-1")
        assert len(store.latest(second)) == 1
    with RecordStore(old, HERE) as store:
        assert store.best(first, 9) == []
        assert [each.seconds for each in store.best(first, 9, elsewhere=True)] == [1e-3, 3e-3]
        # Longer than the column was.
        added = StoredTrial(trials[0].record, 2e-3, run="/a/folder" * 30)
        store.add(first, [added])
        assert [(each.run, each.environment) for each in store.best(first, 9)] == [
            (added.run, HERE)
        ]


def test_verdicts_are_kept(tmp_path: Path) -> None:
    write_first_format(tmp_path / "records.db")
    with RecordStore(tmp_path / "records.db") as store:
        task = store.tasks()[0]
        assert [each.seconds for each in store.finals(task)] == [1.5e-3, None]
    with RecordStore(tmp_path / "records.db", HERE) as store:
        # Proven elsewhere, or nobody knows where; wrong everywhere.
        assert [each.failure for each in store.finals(task)] == ["wrong result"]
        assert [each.seconds for each in store.finals(task, elsewhere=True)] == [1.5e-3]


def test_several_that_open_an_old_store_at_once_upgrade_it_once(old: str) -> None:
    errors: list[Exception] = []

    def open_it() -> None:
        try:
            with RecordStore(old) as store:
                assert len(store.tasks()) == 2
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []


def test_a_step_that_fails_has_not_begun(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(connection: sa.Connection) -> None:
        schema._add_environments(connection)
        raise sa.exc.OperationalError("the rest", {}, Exception("the disk is full"))

    before = described_raw(old)
    with monkeypatch.context() as patched:
        patched.setattr(schema, "STEPS", {"1": half})
        with pytest.raises(StoreError, match=r"disk is full.*Make room"):
            RecordStore(old)
    assert described_raw(old) == before
    with RecordStore(old) as store:
        assert len(store.tasks()) == 2


def described_raw(url: str) -> dict[str, list[str]]:
    engine = sa.create_engine(url if "://" in url else f"sqlite:///{url}")
    inspector = sa.inspect(engine)
    found = {
        name: [column["name"] for column in inspector.get_columns(name)]
        for name in inspector.get_table_names()
    }
    engine.dispose()
    return found


def test_each_format_has_a_step_to_the_next() -> None:
    assert list(schema.STEPS) == [str(number) for number in range(1, schema.FORMAT_VERSION)]
    assert list(_FOLDER.glob("schema_v*.sql"))
    kept = {int(re.findall(r"v(\d+)", path.name)[0]) for path in _FOLDER.glob("schema_v*.sql")}
    assert kept == set(range(1, schema.FORMAT_VERSION))


def test_a_store_that_is_imported_keeps_its_format(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    write_first_format(folder / "old.db")
    before = (folder / "old.db").read_bytes()
    _, *counts = import_records(str(tmp_path / "ours.db"), folder / "old.db")
    assert counts == [4, 0]
    assert [path.name for path in folder.iterdir()] == ["old.db"]
    assert (folder / "old.db").read_bytes() == before


Action = Callable[[str, Path], list[str]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["stats"], "2 tasks, 4 trials"),
        (["export", "out"], "4 records"),
        (["prune", "--keep", "1"], "2 trials deleted"),
        (["import", "."], "0 records added"),
    ],
)
def test_the_command_works_on_an_old_store(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_first_format(tmp_path / "old.db")
    if arguments[0] == "import":
        assert main(["db", "--store", "old.db", "export", "."]) == 0
    elif arguments[0] == "export":
        text = "2 records"
    assert main(["db", "--store", "old.db", *arguments]) == 0
    assert text in capsys.readouterr().out
