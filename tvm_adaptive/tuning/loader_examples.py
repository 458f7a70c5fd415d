"""Small programs that load a compiled model and run it once, in Python and in C++.

They need TVM's runtime and nothing of this package; ``templates`` has their texts.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_TEMPLATES = Path(__file__).with_name("templates")


class Argument(NamedTuple):
    """An argument of a compiled function."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def python_example(
    kind: str, library: str, arguments: Sequence[Argument], *, device: str, pins: str
) -> str:
    """Return a Python program that runs a ``"network"`` or a ``"function"``."""
    lines = [f"    ({each.name!r}, {each.shape!r}, {each.dtype!r})," for each in arguments]
    text = "\n".join(lines)
    return _filled(f"{kind}.py", library=library, arguments=text, device=device, pins=pins)


def cpp_example(library: str, arguments: Sequence[Argument]) -> str:
    """Return a C++ program that runs a network on the CPU."""
    lines = [
        f'      Zeros({{{", ".join(str(extent) for extent in each.shape)}}}, "{each.dtype}")'
        for each in arguments
    ]
    return _filled("network.cc", library=library, arguments=",\n".join(lines))


def _filled(name: str, **values: str) -> str:
    text = (_TEMPLATES / f"{name}.template").read_text(encoding="utf-8")
    return string.Template(text).substitute(values)
