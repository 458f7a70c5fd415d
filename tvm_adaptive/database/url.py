"""Where a record store is: read from a path or URL, and told without its secrets."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, quote_plus

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url

from tvm_adaptive.errors import StoreError

# What stands for a secret in names and messages.
HIDDEN = "***"
BACKENDS = ("sqlite", "postgresql")
# libpq takes its options from a URL's query, too: password, sslpassword, passfile,
# oauth_client_secret and whatever else will be called like that.
_SECRET = re.compile("pass|pwd|secret|token|credential", re.IGNORECASE)
# Shorter ones are words of messages as well, and hiding them would hide nothing else.
_LEAST_SCRUBBED = 3


def url_of(url: str | Path) -> URL:
    """Return where a store is, of a path or a URL."""
    if isinstance(url, Path) or "://" not in url:
        return URL.create("sqlite", database=str(url))
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
        # Of a password with @ or / a part would be taken for host or database, and shown.
        if url.count("@") > (parsed.username is not None):
            raise ValueError("more than one @")
    except (sa.exc.SQLAlchemyError, ValueError):
        # Neither the text nor the parser's message, which quotes parts: they may hold a password.
        raise StoreError(
            "The record store's URL cannot be read; write a path, or for example "
            "postgresql+psycopg://user:secret@host/name, with @, : and / in a password as "
            "%40, %3A and %2F."
        ) from None
    if backend not in BACKENDS:
        raise StoreError(
            f"A record store can be {' or '.join(BACKENDS)}, but the URL begins with {backend}."
        )
    return parsed


def displayed(url: URL) -> str:
    """Return what to call a store in a message or a journal: never a secret of its URL."""
    if url.get_backend_name() == "sqlite" and not url.query:
        return str(url.database)
    hidden = {key: HIDDEN if _SECRET.search(key) else value for key, value in url.query.items()}
    # The password is hidden by SQLAlchemy, which would write stars of ours as %2A.
    text = url.set(query={}).render_as_string(hide_password=True)
    query = "&".join(
        f"{quote_plus(key)}={each if each == HIDDEN else quote_plus(each)}"
        for key, value in hidden.items()
        for each in ([value] if isinstance(value, str) else value)
    )
    return f"{text}?{query}" if query else text


def scrubbed(text: str, url: URL) -> str:
    """Return a message of a database's without the secrets of a URL."""
    secrets = [str(url.password)] if url.password else []
    for key, value in url.query.items():
        if _SECRET.search(key):
            secrets += [value] if isinstance(value, str) else list(value)
    forms = {form for each in secrets for form in (each, quote(each, safe=""), quote_plus(each))}
    for form in sorted(forms, key=len, reverse=True):
        if len(form) >= _LEAST_SCRUBBED:
            text = text.replace(form, HIDDEN)
    return text
