"""Locations of record stores: the user's own, a path, a URL, or a URL in a variable."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import StoreError
from tvm_adaptive.workers.environment import Environment

logger = logging.getLogger(__name__)

# File name of a run's own store in its work directory.
RUN_STORE = "records.db"
USER_STORE = "user"
NO_STORE = "none"
_FROM_ENVIRONMENT = "env:"
# Starter records, part of the package.
STARTER_FOLDER = Path(__file__).with_name("starter")
# Below the home directory, where Linux programs keep data.
_USER_PATH = Path(".local", "share", "tvm_adaptive", "records.db")


def user_store() -> Path:
    """Return the path of the user's own store."""
    try:
        return Path.home() / _USER_PATH
    except RuntimeError as error:  # neither HOME nor an entry in the list of users
        raise StoreError(
            "There is no home directory to keep records in; name a file with --store."
        ) from error


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


def resolve_url(name: str) -> str:
    """Return the path or URL of a store's name, which may be in an environment variable."""
    if name == USER_STORE:
        return str(user_store())
    if not name.startswith(_FROM_ENVIRONMENT):
        return name
    variable = name[len(_FROM_ENVIRONMENT) :]
    url = os.environ.get(variable)
    if not url:
        raise StoreError(
            f"The record store's URL is expected in the environment variable {variable}, which is "
            "not set; set it to the store's URL."
        )
    return url


def redacted_name(name: str, store: RecordStore | None) -> str:
    """Return a store's name for a journal, never with a password."""
    if store is None:
        return NO_STORE
    return name if name.startswith(_FROM_ENVIRONMENT) else store.name
