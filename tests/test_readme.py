"""README's example runs, its names exist, its commands are those of the checks."""

from __future__ import annotations

import argparse
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

import tvm_adaptive
from tvm_adaptive import cli
from tvm_adaptive.search_strategy import AdaptiveSearch
from tvm_adaptive.tuning import registry
from tvm_adaptive.tuning.config import PRESETS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for of, text in fenced if of == language]


def rows_after(header: str) -> list[list[str]]:
    table = README.split(header, 1)[1].split("\n\n", 1)[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if "---" not in row[0]]


def anchors(markdown: str) -> set[str]:
    """The names that GitHub gives to headings."""
    titles = re.findall(r"^#+ (.+)$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def command_parser() -> argparse.ArgumentParser:
    return cli._parser()


def test_the_example_imports_what_exists() -> None:
    (example,) = blocks("python")
    imports = [line for line in example.splitlines() if line.startswith(("import ", "from "))]
    assert len(imports) >= 2
    exec("\n".join(imports), {})


@pytest.mark.slow
def test_the_example_tunes(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (example,) = blocks("python")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    records = names["database"].get_all_tuning_records()
    assert len(records) == 16
    assert "None" not in capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "runs" / "matmul").is_dir()


def test_the_names_are_registered() -> None:
    rows = rows_after("| argument | stock names | names added here |")
    for part, stock, ours, *_ in rows:
        part_name = part.strip("`=")
        assert re.findall(r'"([\w-]+)"', ours) == list(registry.PARTS[part_name].constructors)
        assert re.findall(r'"([\w-]+)"', stock) == list(registry.STOCK_NAMES[part_name])
    added = [part for part in registry.PARTS if registry.PARTS[part].constructors]
    assert sorted(row[0].strip("`=") for row in rows) == sorted(added)


def test_the_classes_are_public() -> None:
    for *_, classes in rows_after("| argument | stock names | names added here |"):
        for name in re.findall(r"`(\w+)`", classes):
            assert name in tvm_adaptive.__all__


@pytest.mark.parametrize("rule", re.findall(r'rule="(\w+)"', README))
def test_the_rules_exist(rule: str) -> None:
    assert tvm_adaptive.AdaptiveRunner(rule=rule) is not None


@pytest.mark.parametrize("diversity", ["knobs", "medoids"])
def test_the_diversities_exist(diversity: str) -> None:
    assert f'"{diversity}"' in README
    assert AdaptiveSearch(diversity=diversity) is not None


def test_the_options_are_those_of_the_command_line() -> None:
    cells = [row[0] for row in rows_after("| `tvm-adaptive tune WHAT` |")]
    stated = {option for cell in cells for option in re.findall(r"`(-[\w-]+)", cell)}
    helps = command_parser()._subparsers._group_actions[0].choices["tune"]  # type: ignore[union-attr, index, call-overload]
    known = {option for action in helps._actions for option in action.option_strings}
    short = {"-q": "--quiet", "-v": "--verbose"}
    assert stated <= known
    assert known - stated == {"-h", "--help", *short.values()}


def test_the_presets_are_named() -> None:
    (row,) = [row for row in rows_after("| `tvm-adaptive tune WHAT` |") if "--preset" in row[0]]
    assert set(PRESETS) <= set(re.findall(r"`(\w+)`", row[1]))


def test_the_main_command_is_understood() -> None:
    main, _ = commands()
    arguments = main.split(".venv/bin/tvm-adaptive ", 1)[1].split()
    options = command_parser().parse_args(arguments)
    assert (options.what, options.budget) == ("resnet18", 600.0)


def test_the_checks_run_the_test_command() -> None:
    _, test = commands()
    assert test in (ROOT / ".ci" / "run").read_text().splitlines()


def commands() -> tuple[str, str]:
    main, test = (block.strip() for block in blocks("") if "pip install" in block)
    return main, test


def test_the_versions_are_those_that_pip_takes() -> None:
    wanted = {
        name: SpecifierSet(rest)
        for name, rest in re.findall(
            r'^  "(apache-tvm(?:-ffi)?)([<>=][^"]+)"', (ROOT / "pyproject.toml").read_text(), re.M
        )
    }
    assert set(wanted) == {"apache-tvm", "apache-tvm-ffi"}
    for name, versions in rows_after("## Versions"):
        if name in wanted:
            assert all(wanted[name].contains(version) for version in versions.split(", "))
            assert metadata.version(name) in versions.split(", ")


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        path, _, anchor = link.partition("#")
        path = path or "README.md"
        assert (ROOT / path).exists(), link
        if anchor:
            assert anchor in anchors((ROOT / path).read_text()), link
