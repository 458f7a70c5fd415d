"""Files with a row for each thing that was measured: a later row of the same thing counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_rows(path: Path, *names: str) -> dict[Any, dict[str, Any]]:
    """Return the latest rows by the value of a field, or by those of several as a tuple."""
    if not path.exists():
        return {}
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    if len(names) == 1:
        return {row[names[0]]: row for row in rows}
    return {tuple(row[name] for name in names): row for row in rows}


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Write a row behind the others."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
