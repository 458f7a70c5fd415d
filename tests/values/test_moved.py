from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import tvm_adaptive
from tvm_adaptive.values.moved import MODULES, NAMES

# What README and the reference of version 0.1 named, by its module there.
DOCUMENTED = {
    "config": ("DEFAULT", "PAPER", "SearchConfig", "TuneConfig"),
    "deploy": ("apply",),
    "importers": ("load",),
    "notebook": ("NotebookView",),
    "outcome": ("TuneReport",),
    "prefetch": ("follow_hints",),
    "records": ("StopDecision",),
    "registry": ("register", "unregister"),
    "resume": ("resume",),
    "runner.boards": ("BoardRules",),
    "task_scheduler.belief": ("forecast",),
    "task_scheduler.curve": ("CurveFamily", "ShapeParameter"),
}


def test_these_are_all() -> None:
    assert set(DOCUMENTED) == set(MODULES)


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in DOCUMENTED for name in DOCUMENTED[module]]
)
def test_a_former_name_works_and_warns(module: str, name: str) -> None:
    former = importlib.import_module(f"tvm_adaptive.{module}")
    with pytest.warns(DeprecationWarning, match=f"tvm_adaptive.{MODULES[module]}.*0.4") as found:
        value = getattr(former, name)
    present = importlib.import_module(f"tvm_adaptive.{MODULES[module]}")
    assert value is getattr(present, name)
    assert found[0].filename == __file__


@pytest.mark.parametrize(
    ("module", "former", "present"),
    [(module, *names) for module in NAMES for names in NAMES[module].items()],
)
def test_a_name_that_changed_works_and_warns(module: str, former: str, present: str) -> None:
    there = importlib.import_module(f"tvm_adaptive.{module}")
    with pytest.warns(DeprecationWarning, match=f"tvm_adaptive.{module}.{present}.*0.4") as found:
        value = getattr(there, former)
    assert value is getattr(there, present)
    assert found[0].filename == __file__


def test_what_never_was_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="NEVER"):
        _ = tvm_adaptive.report.NEVER
    with pytest.raises(AttributeError):
        _ = tvm_adaptive.config.NEVER  # type: ignore[attr-defined]


def test_the_package_itself_uses_no_former_name() -> None:
    modules = (
        "tvm_adaptive.cli, tvm_adaptive.tuning.deploy, tvm_adaptive.tuning.resume, "
        "tvm_adaptive.report, tvm_adaptive.models.frontend"
    )
    command = [sys.executable, "-W", "error::DeprecationWarning:tvm_adaptive", "-c"]
    subprocess.run([*command, f"import {modules}"], check=True)
