"""What an extension raises, as a broken rule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tvm_adaptive.errors import summary_line


@contextlib.contextmanager
def must_not_raise(what: str) -> Iterator[None]:
    """Turn any exception inside into an AssertionError that begins with ``what``."""
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        raise AssertionError(f"{what} raised {kind}: {summary_line(error)}") from error
