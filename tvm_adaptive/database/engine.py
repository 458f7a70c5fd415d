"""What a record store needs to know of SQLite and PostgreSQL."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url

from tvm_adaptive.errors import StoreError

# Another writer holds the file for milliseconds; minutes of waiting mean that it hangs.
BUSY_TIMEOUT_SEC = 60.0
# While one process turns a new file to write-ahead mode, others cannot.
_WAL_TRIES = 50
_WAL_WAIT_SEC = 0.1
INSERTS = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


def url_of(url: str | Path) -> URL:
    """Return where a store is, of a path or a URL.

    Raises
    ------
    StoreError
        When it is no URL, or of a database that cannot be a store.
    """
    if isinstance(url, Path) or "://" not in url:
        return URL.create("sqlite", database=str(url))
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
    except sa.exc.ArgumentError as error:
        # Not the text itself: it may hold a password.
        raise StoreError(
            "The record store's URL cannot be read; write a path, or for example "
            "postgresql+psycopg://user:secret@host/name."
        ) from error
    if backend not in INSERTS:
        raise StoreError(
            f"A record store can be {' or '.join(INSERTS)}, but the URL begins with {backend}."
        )
    return parsed


def advice_on(reason: str) -> str:
    """Return what to do about an error, by what the database said of it."""
    lowered = reason.lower()
    if "malformed" in lowered or "not a database" in lowered:
        return "Nothing was changed. Move the file away, or restore a copy of it."
    if "full" in lowered:
        return "Make room, or name a store on another disk."
    if "no module named" in lowered:
        return "Install the driver: pip install 'tvm-adaptive[postgres]'."
    return "Check that the path or server is there and may be written to."


def set_up_sqlite(connection: Any, _: Any) -> None:
    """Prepare a connection of SQLite's driver; for SQLAlchemy's event of that."""
    # Transactions are begun by us: Python's own driver begins them too late.
    connection.isolation_level = None
    cursor = connection.cursor()
    for n_left in reversed(range(_WAL_TRIES)):
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or not n_left:
                raise
            time.sleep(_WAL_WAIT_SEC)
    # What is acknowledged survives a power cut, too; one write per batch can afford it.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
