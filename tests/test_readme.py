"""README's example runs, its names exist, its commands are those of the checks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import tvm_adaptive
from tvm_adaptive import cli
from tvm_adaptive.tuning import registry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PACKAGE = ROOT / "tvm_adaptive"
# Every document that a reader of the repository may open.
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "tests/README.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((PACKAGE / "docs").glob("*.md")),
]


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


def test_the_main_command_is_understood() -> None:
    main, _ = commands()
    arguments = main.split(".venv/bin/tvm-adaptive ", 1)[1].split()
    options = cli._parser().parse_args(arguments)
    assert (options.what, options.budget) == ("resnet18", 600.0)


def test_the_checks_run_the_test_command() -> None:
    _, test = commands()
    assert test in (ROOT / ".ci" / "run").read_text().splitlines()


def commands() -> tuple[str, str]:
    main, test = (block.strip() for block in blocks("") if "pip install" in block)
    return main, test


def test_folders_and_files_exist() -> None:
    built = README.split("## How it is built", 1)[1].split("\n## ", 1)[0]
    named = re.findall(r"`([\w/]+(?:/|\.py))`", built)
    assert len(named) >= 15
    assert [
        name for name in named if not any((top / name).exists() for top in (PACKAGE, ROOT))
    ] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text()):
        name, _, anchor = link.partition("#")
        path = (document.parent / name) if name else document
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path.read_text()), link


def test_links_to_the_repository_lead_somewhere() -> None:
    address = "https://github.com/tvm-adaptive/tvm-adaptive/blob/main/"
    found = [
        link
        for document in DOCUMENTS
        for link in re.findall(rf"{address}([^)\s]+)", document.read_text())
    ]
    for link in found:
        name, _, anchor = link.partition("#")
        assert not anchor or anchor in anchors((ROOT / name).read_text()), link
        assert (ROOT / name).exists(), link
