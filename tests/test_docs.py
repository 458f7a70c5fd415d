"""The pages: every block of code runs, every command is understood, every name is there."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

import tvm_adaptive
from tvm_adaptive import cli
from tvm_adaptive.search_strategy import AdaptiveSearch
from tvm_adaptive.tuning.config import PRESETS
from tvm_adaptive.values.moved import MODULES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "tvm_adaptive" / "docs"
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one folder for all blocks, so that their runs can share a server of workers."""
    return tmp_path_factory.mktemp("blocks")


@pytest.mark.parametrize("text", blocks("python"))
def test_every_block_of_code_runs(text: str, folder: Path, monkeypatch: Any) -> None:
    if "import torch" in text:
        pytest.importorskip("torch")
    if "NotebookView" in text:
        pytest.importorskip("IPython")
    monkeypatch.chdir(folder)
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
@pytest.mark.usefixtures("torch_for_commands")
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


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text()


def rows_of(markdown: str) -> list[list[str]]:
    """Return the cells of every row of every table, without the lines below headers."""
    rows = re.findall(r"^\|(.+)\|$", markdown, re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows if "---" not in row]


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(actions[0].choices) if actions else {}


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a command and of its actions."""
    for action in parser._actions:
        yield from action.option_strings
    for inner in subparsers(parser).values():
        yield from options_of(inner)


def section_of(command: str) -> str:
    return text_of("commands").split(f"\n## {command}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize("command", sorted(subparsers(cli._parser())))
def test_the_options_are_those_of_the_command(command: str) -> None:
    code = " ".join(re.findall(r"`([^`]+)`", " ".join(map(" ".join, rows_of(section_of(command))))))
    stated = set(re.findall(r"(?<![\w-])(--?[a-z][\w-]*)", code))
    known = set(options_of(subparsers(cli._parser())[command]))
    assert stated == known - {"-h", "--help", "--quiet", "--verbose"}


def test_the_actions_are_those_of_the_command() -> None:
    named = {re.findall(r"`(\w+)", row[0])[0] for row in rows_of(section_of("db"))[2:]}
    assert named == set(subparsers(subparsers(cli._parser())["db"]))


def test_the_presets_are_named() -> None:
    (row,) = [row for row in rows_of(section_of("tune")) if "--preset" in row[0]]
    assert set(re.findall(r"`(\w+)`", row[1])) == set(PRESETS)


@pytest.mark.parametrize("rule", re.findall(r'rule="(\w+)"', text_of("papers")))
def test_the_rules_exist(rule: str) -> None:
    assert tvm_adaptive.AdaptiveRunner(rule=rule) is not None


@pytest.mark.parametrize("diversity", ["knobs", "medoids"])
def test_the_diversities_exist(diversity: str) -> None:
    assert f'"{diversity}"' in text_of("papers")
    assert AdaptiveSearch(diversity=diversity) is not None


def test_the_versions_are_those_that_pip_takes() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    wanted = {
        name: SpecifierSet(rest)
        for name, rest in re.findall(r'^  "(apache-tvm(?:-ffi)?)([<>=][^"]+)"', project, re.M)
    }
    stated = {name: versions.split(", ") for name, versions in rows_of(text_of("versions"))[1:]}
    tested = stated.pop("torch (optional)")
    assert tested == re.findall(r'deps = \["torch==([^"]+)"\]', project)
    assert set(wanted) == set(stated) == {"apache-tvm", "apache-tvm-ffi"}
    for name, versions in stated.items():
        assert all(wanted[name].contains(version) for version in versions)
        assert metadata.version(name) in versions


@pytest.mark.parametrize("page", ["tour", "papers", "extending"])
def test_the_files_that_a_page_names_exist(page: str) -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", text_of(page)))
    assert len(named) >= (60 if page == "tour" else 3)
    folders = (ROOT / "tvm_adaptive", ROOT)
    missing = {name for name in named if not any((top / name).is_file() for top in folders)}
    assert missing - {"my_model.py"} == set()


def test_the_tour_passes_every_stage() -> None:
    stages = "search_strategy", "builder", "runner", "cost_model", "task_scheduler", "database"
    flow = text_of("tour").split("## One candidate", 1)[1].split("\n## ", 1)[0]
    assert all(f"`{stage}/" in flow for stage in stages)


def test_the_changes_name_the_moved_modules() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    rows = rows_of(changes.split("### Moved modules", 1)[1].split("\n### ", 1)[0])
    names = [[cell.strip("`").removeprefix("tvm_adaptive.") for cell in row] for row in rows]
    assert dict(names[1:]) == MODULES  # type: ignore[arg-type]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / ".ci" / "mkdocs.yml").read_text()
    assert re.findall(r"^  - (\w+)\.md$", navigation, re.MULTILINE)[0] == "index"
    assert set(re.findall(r"^  - (\w+)\.md$", navigation, re.MULTILINE)) == {
        page.stem for page in PAGES
    }


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
