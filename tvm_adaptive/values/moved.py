"""Former names of modules and in them, which work with a warning until version 0.4."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from typing import Any

_PACKAGE = "tvm_adaptive"
# Those in README or the reference, below the package.
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
# The same of names that changed in a module that stays.
NAMES = {
    "report": {"Story": "RunHistory", "read_stories": "read_runs", "read_story": "read_run"},
}


def former_name(module: str, name: str) -> Any:
    """Return what a former name of a module means now: the module's ``__getattr__``."""
    present = NAMES[module.removeprefix(f"{_PACKAGE}.")].get(name)
    if present is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    _warn(f"{module}.{name}", f"{module}.{present}", depth=3)
    return getattr(sys.modules[module], present)


def _warn(former: str, present: str, depth: int) -> None:
    """Warn whoever looked the name up, so many calls above."""
    warnings.warn(
        f"{former} is {present} now; the former name ends with version 0.4.",
        DeprecationWarning,
        stacklevel=depth + 1,
    )


class _MovedModule(types.ModuleType):
    """Resolves names of a former module in the present one."""

    def __init__(self, former: str, present: str) -> None:
        super().__init__(f"{_PACKAGE}.{former}", f"Moved to ``{_PACKAGE}.{present}``.")
        self._present = f"{_PACKAGE}.{present}"

    def __getattr__(self, name: str) -> Any:
        # The import system and tools look up such names in every module.
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(importlib.import_module(self._present), name)
        _warn(f"{self.__name__}.{name}", f"{self._present}.{name}", depth=2)
        return value


def keep_former_names() -> None:
    """Make the former names of modules importable."""
    for former, present in MODULES.items():
        module = _MovedModule(former, present)
        sys.modules[module.__name__] = module
        parent, _, leaf = module.__name__.rpartition(".")
        setattr(sys.modules[parent], leaf, module)
