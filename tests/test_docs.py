"""The pages: every block of code runs, every command is understood, every name is there."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tvm_adaptive import cli

DOCS = Path(__file__).parents[1] / "tvm_adaptive" / "docs"
PAGES = sorted(DOCS.glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[Any]:
    found = []
    for page in PAGES:
        texts = [text for of, text in BLOCK.findall(page.read_text()) if of == language]
        found += [pytest.param(text, id=f"{page.stem}-{place}") for place, text in enumerate(texts)]
    return found


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.values[0].splitlines()]
    return [shlex.split(line) for line in lines if line]


def only_shown() -> list[list[str]]:
    """Return the commands of this package that need more than this machine."""
    lines = [line for block in blocks("console") for line in block.values[0].splitlines()]
    return [shlex.split(line[2:]) for line in lines if line.startswith("$ tvm-adaptive")]


def test_there_are_pages() -> None:
    assert {page.stem for page in PAGES} >= {"index", "quickstart", "newcomers", "reference"}
    assert len(blocks("python")) >= 8


@pytest.mark.parametrize("text", blocks("python"))
def test_every_block_of_code_runs(text: str, tmp_path: Path, monkeypatch: Any) -> None:
    if "import torch" in text:
        pytest.importorskip("torch")
    if "NotebookView" in text:
        pytest.importorskip("IPython")
    monkeypatch.chdir(tmp_path)
    page = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)  # dataclasses look for their module
    exec(compile(text, "page", "exec"), page.__dict__)


@pytest.mark.parametrize("command", [*commands(), *only_shown()], ids=" ".join)
def test_every_command_is_understood(command: list[str]) -> None:
    if command[0] == "tvm-adaptive":
        assert cli._parser().parse_args(command[1:]).run is not None
    else:
        assert command[:2] in (["pip", "install"], ["python", "deploy/example.py"])


@pytest.mark.slow
def test_the_quick_start_works_from_top_to_bottom(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("torch")
    (model,) = [b.values[0] for b in blocks("python") if b.values[0].startswith("# my_model.py")]
    (tmp_path / "my_model.py").write_text(model)
    for command in commands():
        if command[0] == "pip":
            continue
        start = [sys.executable] + (["-m", "tvm_adaptive"] if command[0] != "python" else [])
        done = subprocess.run(
            [*start, *command[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
    assert (tmp_path / "runs" / "mine" / "report.html").exists()
    assert (tmp_path / "deploy" / "example.cc").exists()


def test_links_and_pictures_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (DOCS / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize(
    "name", re.findall(r"^::: ([\w.]+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
)
def test_the_reference_names_what_exists(name: str) -> None:
    try:
        documented: Any = importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        documented = getattr(importlib.import_module(module), attribute)
    assert documented.__doc__
