"""The options in which runs differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

# What tells runs apart anyway.
_LEFT_OUT = frozenset({"event", "time_sec", "run_id", "elapsed_sec", "resumed"})


def option_differences(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return by dotted names the options that differ in the events ``run`` of journals."""
    flat = [_flat({key: run[key] for key in run if key not in _LEFT_OUT}) for run in runs]
    names = dict.fromkeys(name for each in flat for name in each)
    rows = {name: [each.get(name, "-") for each in flat] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested fields by dotted names, as text."""
    found: dict[str, str] = {}
    for key, value in fields.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
        else:
            found[name] = value if isinstance(value, str) else json.dumps(value)
    return found
