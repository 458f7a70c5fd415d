"""Locations of record stores: the user's own, a path, a URL, or a URL in a variable.

In names and messages they are shown without their secrets.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote, quote_plus

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url

from tvm_adaptive.errors import StoreError

# File name of a run's own store in its work directory.
RUN_STORE = "records.db"
USER_STORE = "user"
NO_STORE = "none"
FROM_ENVIRONMENT = "env:"
# Starter records, part of the package.
STARTER_FOLDER = Path(__file__).with_name("starter")
# Below the home directory, where Linux programs keep data.
_USER_PATH = Path(".local", "share", "tvm_adaptive", "records.db")
# Stands for a secret in names and messages.
HIDDEN = "***"
_BACKENDS = ("sqlite", "postgresql")
# Those of SQLite, and those of PostgreSQL that take libpq's keywords.
_DRIVERS = ("pysqlite", "psycopg", "psycopg2")
# libpq takes options from a URL's query, too: password, sslpassword, passfile,
# oauth_client_secret and whatever later versions name alike.
_SECRET = re.compile("pass|pwd|secret|token|credential", re.IGNORECASE)
# A shorter secret is part of common words, and hiding those would hide nothing else.
_MIN_SCRUBBED_CHARS = 3


def user_store() -> Path:
    """Return the path of the user's own store."""
    try:
        return Path.home() / _USER_PATH
    except RuntimeError as error:  # neither HOME nor an entry in the list of users
        raise StoreError(
            "There is no home directory to keep records in; name a file with --store."
        ) from error


def resolve_url(name: str) -> str:
    """Return the path or URL of a store's name, which may be in an environment variable."""
    if not name:  # SQLite would keep it in memory
        raise StoreError("A record store has an empty name; write a path, a URL or none.")
    if name == USER_STORE:
        return str(user_store())
    if not name.startswith(FROM_ENVIRONMENT):
        return _expanded(name)
    variable = name[len(FROM_ENVIRONMENT) :]
    url = os.environ.get(variable)
    if not url:
        raise StoreError(
            f"The record store's URL is expected in the environment variable {variable}, which is "
            "not set; set it to the store's URL."
        )
    return _expanded(url)


def _expanded(url: str) -> str:
    """Return a path without ``~``, which no shell expands in a file or behind ``--store=``."""
    return url if "://" in url else os.path.expanduser(url)


def url_of(url: str | Path) -> URL:
    """Parse the path or URL of a store."""
    if isinstance(url, Path) or "://" not in url:
        return URL.create("sqlite", database=str(url))
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
        # Part of a password with @ or / would become host or database, and be shown.
        if backend != "sqlite" and url.count("@") > (parsed.username is not None):
            raise ValueError("more than one @")
    except (sa.exc.SQLAlchemyError, ValueError):
        # Neither the text nor the parser's message, which quotes it: they may hold a password.
        raise StoreError(
            "The record store's URL cannot be read; write a path, or for example "
            "postgresql+psycopg://user:secret@host/name, with @, : and / in a password as "
            "%40, %3A and %2F."
        ) from None
    if backend not in _BACKENDS or parsed.get_driver_name() not in _DRIVERS:
        raise StoreError(
            f"A record store can be {' or '.join(_BACKENDS)} (by psycopg), but the URL begins "
            f"with {parsed.drivername}."
        )
    return parsed


def displayed(url: URL) -> str:
    """Return a store's name for messages and journals, without the secrets of its URL."""
    if url.get_backend_name() == "sqlite" and not url.query:
        return str(url.database)
    # SQLAlchemy hides the password, but would write the stars of the query as %2A.
    text = url.set(query={}).render_as_string(hide_password=True)
    query = "&".join(
        f"{quote_plus(key)}={HIDDEN if _SECRET.search(key) else quote_plus(value)}"
        for key, value in _query_of(url)
    )
    return f"{text}?{query}" if query else text


def scrubbed(text: str, url: URL) -> str:
    """Return a database's message without the secrets of a URL."""
    secrets = [value for key, value in _query_of(url) if _SECRET.search(key)]
    secrets += [str(url.password)] if url.password else []
    forms = {form for each in secrets for form in (each, quote(each, safe=""), quote_plus(each))}
    for form in sorted(forms, key=len, reverse=True):
        if len(form) >= _MIN_SCRUBBED_CHARS:
            text = text.replace(form, HIDDEN)
    return text


def _query_of(url: URL) -> list[tuple[str, str]]:
    return [
        (key, each)
        for key, value in url.query.items()
        for each in ([value] if isinstance(value, str) else value)
    ]
