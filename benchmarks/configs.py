"""From a method, which is data, to a configuration of the package."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.methods import Method
from tvm_adaptive.tuning.config import TuneConfig, preset


def config_of(method: Method) -> TuneConfig:
    """Return the configuration that a method stands for; of stock's, how it prepares.

    Raises
    ------
    InvalidOptionError
        For an option that does not exist.
    """
    config = preset(method.preset)
    stages: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for key, value in method.changes.items():
        stage, _, option = key.rpartition(".")
        if stage:
            stages.setdefault(stage, {})[option] = value
        else:
            plain[key] = value
    for stage, changes in stages.items():
        plain[stage] = dataclasses.replace(getattr(config, stage), **changes)
    return config.replace(**plain)
