"""A configuration as a TOML file: read, checked strictly, and written.

preset = "default"        # for all options that the file does not set
cost_model = "rfei"

[search]
n_trials_per_round = 32
epsilon = "none"          # None, which TOML lacks
"""

from __future__ import annotations

import dataclasses
import math
import sys
import typing
from pathlib import Path
from typing import Any

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.tuning.config import DEFAULT, TuneConfig, preset
from tvm_adaptive.tuning.option_types import kinds_of, value_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NONE = "none"

_Stage = typing.TypeVar("_Stage", bound=Any)


def read_config(path: Path) -> TuneConfig:
    """Read a configuration."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOptionError(f"The configuration {path} cannot be read: {error}.") from error
    return parse_config(text, str(path))


def parse_config(text: str, name: str = "the configuration") -> TuneConfig:
    """Return the configuration of a TOML text."""
    try:
        given = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidOptionError(f"{name} is not valid TOML: {error}.") from error
    base_name = given.pop("preset", "default")
    if not isinstance(base_name, str):
        raise InvalidOptionError(f"{name}: preset must be a name but got {base_name!r}.")
    return _changed(preset(base_name), _in_present_words(given), name)


def config_of_fields(fields: dict[str, Any], name: str) -> TuneConfig:
    """Return the configuration of nested mappings, as in a journal."""
    return _changed(DEFAULT, _in_present_words(fields), name)


def write_config(config: TuneConfig) -> str:
    """Return a configuration as TOML text with every option."""
    options = dataclasses.asdict(config)
    tables = {name: value for name, value in options.items() if isinstance(value, dict)}
    plain = {name: value for name, value in options.items() if name not in tables}
    blocks = [_lines(plain), *(f"[{name}]\n{_lines(table)}" for name, table in tables.items())]
    return "\n\n".join(blocks) + "\n"


def _in_present_words(fields: dict[str, Any]) -> dict[str, Any]:
    """Return what files of version 0.1 say as this version says it."""
    search = fields.get("search")
    if isinstance(search, dict) and search.get("proposer") == "distilled":
        return {**fields, "search": {**search, "proposer": "surrogate"}}
    return fields


def _changed(stage: _Stage, given: dict[str, Any], name: str, prefix: str = "") -> _Stage:
    """Return a dataclass with some of its fields changed, each checked by its type."""
    hints = typing.get_type_hints(type(stage))
    changes = {}
    for key, value in given.items():
        option = f"{prefix}{key}"
        if key not in hints:
            raise InvalidOptionError(
                f"{name}: there is no option {option}; possible are {', '.join(sorted(hints))}."
            )
        current = getattr(stage, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise InvalidOptionError(f"{name}: {option} is a table, as in [{option}].")
            changes[key] = _changed(current, value, name, f"{option}.")
        else:
            changes[key] = _value_of(value, hints[key], f"{name}: {option}")
    try:
        return dataclasses.replace(stage, **changes)
    except InvalidOptionError as error:
        raise InvalidOptionError(f"{name}: {error}") from error


def _value_of(value: Any, hint: Any, option: str) -> Any:
    """Return an option's value from what a file or a journal has for it."""
    kinds = kinds_of(hint)
    if value == _NONE and type(None) in kinds:
        return None
    if value is None and type(None) not in kinds and float in kinds:
        return math.inf  # a journal's; TOML has an infinity of its own
    return value_of(value, hint, option)


def _lines(options: dict[str, Any]) -> str:
    return "\n".join(f"{name} = {_as_toml(value)}" for name, value in options.items())


def _as_toml(value: Any) -> str:
    if value is None:
        return f'"{_NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
