"""Modules that have moved: until version 0.4 their former names work, with a warning."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Mapping
from typing import Any

_PACKAGE = "tvm_adaptive"
# Those that README or the reference named, below the package.
MODULES = {
    "config": "tuning.config",
    "deploy": "tuning.deploy",
    "importers": "models.frontend",
    "notebook": "report.notebook",
    "outcome": "tuning.outcome",
    "prefetch": "models.prefetch",
    "records": "values.trial",
    "registry": "tuning.registry",
    "resume": "tuning.resume",
    "runner.boards": "runner.rpc.device_pool",
    "task_scheduler.belief": "task_scheduler.forecast.belief",
    "task_scheduler.curve": "task_scheduler.forecast.curve",
}
# Names in them that have another name now, by the former module.
NAMES: Mapping[str, Mapping[str, str]] = {}


class _MovedModule(types.ModuleType):
    """Stands where a module was, and hands out what is in its new place."""

    def __init__(self, former: str, present: str) -> None:
        super().__init__(f"{_PACKAGE}.{former}", f"Moved to ``{_PACKAGE}.{present}``.")
        self._former, self._present = former, f"{_PACKAGE}.{present}"

    def __getattr__(self, name: str) -> Any:
        # The import system and tools ask every module for such names.
        if name.startswith("__"):
            raise AttributeError(name)
        present = NAMES.get(self._former, {}).get(name, name)
        value = getattr(importlib.import_module(self._present), present)
        warnings.warn(
            f"{self.__name__}.{name} is {self._present}.{present} now; the former name ends "
            "with version 0.4.",
            DeprecationWarning,
            stacklevel=2,
        )
        return value


def keep_former_names() -> None:
    """Make the former names of modules importable."""
    for former, present in MODULES.items():
        module = _MovedModule(former, present)
        sys.modules[module.__name__] = module
        parent, _, leaf = module.__name__.rpartition(".")
        setattr(sys.modules[parent], leaf, module)
