"""Words on the command line stand for entries of a table, or for sets of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def choose(
    kind: str,
    words: Sequence[str],
    entries: Mapping[str, T],
    sets: Mapping[str, Sequence[str]],
) -> tuple[T, ...]:
    """Return the entries that names of entries and of sets stand for, each once.

    Parameters
    ----------
    kind : str
        What an entry is, for the message.
    words : sequence of str
    entries : mapping
    sets : mapping
        Names of entries by the name of their set.

    Raises
    ------
    ValueError
        For a word that is neither.
    """
    names: list[str] = []
    for word in words:
        if word not in sets and word not in entries:
            raise ValueError(
                f"There is no {kind} {word!r}; {kind}s are {', '.join(entries)}, sets of them "
                f"{', '.join(sets)}."
            )
        names += sets.get(word, (word,))
    return tuple(entries[name] for name in dict.fromkeys(names))
