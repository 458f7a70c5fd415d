"""Look after a record store: what it holds, in and out, and less of it."""

from __future__ import annotations

from pathlib import Path

from tvm_adaptive.database.exchange import export_json, import_json
from tvm_adaptive.database.records import TaskStats
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.memory import NO_STORE, USER_STORE, revealed, user_store


def stats(store: str) -> tuple[str, list[TaskStats]]:
    """Return a store's name for people, and what it holds per task.

    Parameters
    ----------
    store : str
        ``"user"``, a path or a URL, as in ``TuneConfig.store``.

    Raises
    ------
    InvalidOptionError
        When there is no such store.
    StoreError
        When it cannot be read.
    """
    with _open(store, must_exist=True) as opened:
        return opened.name, opened.stats()


def export_records(store: str, folder: Path, best: int | None = None) -> int:
    """Write a store as MetaSchedule's JSON database; see ``database.exchange``.

    Raises
    ------
    InvalidOptionError
        When there is no such store, or the folder cannot be used.
    StoreError
        When the store cannot be read.
    """
    with _open(store, must_exist=True) as opened:
        return export_json(opened, folder, best)


def import_records(store: str, folder: Path) -> tuple[str, int, int]:
    """Add a JSON database's records; return the store's name, how many were added, left out.

    Raises
    ------
    InvalidOptionError
        When the folder holds no database.
    StoreError
        When the store cannot be written.
    """
    with _open(store) as opened:
        return opened.name, *import_json(opened, folder)


def prune(store: str, keep: int) -> tuple[str, int]:
    """Keep the fastest trials of each task; return the store's name and how many went.

    Raises
    ------
    InvalidOptionError
        When there is no such store.
    StoreError
        When it cannot be written.
    """
    with _open(store, must_exist=True) as opened:
        return opened.name, opened.prune(keep)


def _open(store: str, *, must_exist: bool = False) -> RecordStore:
    if store == NO_STORE:
        raise InvalidOptionError(f"{NO_STORE} names no store; give a path or a URL.")
    place = user_store() if store == USER_STORE else revealed(store)
    # A mistyped path must not become a new, empty store.
    if must_exist and "://" not in str(place) and not Path(place).is_file():
        raise InvalidOptionError(f"There is no record store {place}.")
    return RecordStore(place)
