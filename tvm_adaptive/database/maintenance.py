"""Look after a record store: what it holds, in and out, and less of it."""

from __future__ import annotations

from pathlib import Path

from tvm_adaptive.database.exchange import export_json, has_json, import_json, import_store
from tvm_adaptive.database.location import NO_STORE, RUN_STORE, USER_STORE, resolve_url, user_store
from tvm_adaptive.database.records import TaskStats
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import InvalidOptionError, JournalError
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE, read_journal
from tvm_adaptive.workers.environment import UNKNOWN, Environment


def stats(store: str) -> tuple[str, list[TaskStats]]:
    """Return a store's name for people, and what it holds per task."""
    with _open(store, must_exist=True) as opened:
        return opened.name, opened.stats()


def export_records(store: str, folder: Path, best: int | None = None) -> int:
    """Write a store as MetaSchedule's JSON database; see ``database.exchange``."""
    with _open(store, must_exist=True) as opened:
        return export_json(opened, folder, best)


def import_records(store: str, folder: Path) -> tuple[str, int, int]:
    """Add the records of a run's folder, or of a JSON database."""
    own = folder / RUN_STORE
    with _open(store) as opened:
        if not own.is_file() or str(own.resolve()) == str(
            Path(opened.url.database or "").resolve()
        ):
            return opened.name, *import_json(opened, folder, _environment_of(folder))
        with RecordStore(own) as other:
            n_added, n_skipped = import_store(opened, other)
        if has_json(folder):
            # Nearly all of it was in the run's store; that is no news.
            n_added += import_json(opened, folder, _environment_of(folder))[0]
        return opened.name, n_added, n_skipped


def _environment_of(folder: Path) -> Environment:
    """Return where a run measured; unknown if its journal does not say so, or several."""
    journal = folder / JOURNAL_FILE
    if not journal.is_file():
        return UNKNOWN
    try:
        runs = [event for event in read_journal(journal) if event.get("event") == "run"]
    except JournalError:
        return UNKNOWN
    found = {Environment.from_fields(event) for event in runs}
    return found.pop() if len(found) == 1 else UNKNOWN


def prune(store: str, keep: int) -> tuple[str, int]:
    """Keep the fastest trials of each task; return the store's name and how many went."""
    with _open(store, must_exist=True) as opened:
        return opened.name, opened.prune(keep)


def _open(store: str, *, must_exist: bool = False) -> RecordStore:
    if store == NO_STORE:
        raise InvalidOptionError(f"{NO_STORE} names no store; give a path or a URL.")
    place = user_store() if store == USER_STORE else resolve_url(store)
    # A mistyped path must not become a new, empty store.
    if must_exist and "://" not in str(place) and not Path(place).is_file():
        raise InvalidOptionError(f"There is no record store {place}.")
    return RecordStore(place)
