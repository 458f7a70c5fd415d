"""The options in which runs and their models differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tvm_adaptive.measure_callback.history import History

# What tells runs apart anyway.
_LEFT_OUT = frozenset({"event", "time_sec", "run_id", "elapsed_sec", "resumed"})


def option_differences(histories: Sequence[History]) -> dict[str, list[str]]:
    """Return by dotted names what differs in the events ``run`` and ``model`` of journals."""
    flat = [_flat(_known(each.run) | {"model": _known(each.model or {})}) for each in histories]
    names = dict.fromkeys(name for each in flat for name in each)
    rows = {name: [each.get(name, "-") for each in flat] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _known(event: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in _LEFT_OUT}


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
