"""Docstrings that exist, and do not lie about defaults."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1] / "tvm_adaptive"
FILES = sorted(PACKAGE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef

_SECTION = re.compile(r"^(?P<title>[A-Z][A-Za-z ]+)\n-{3,}\n", re.MULTILINE)
_ENTRY = re.compile(r"^(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: *: *(?P<type>.*))?$")
# "default 0.02", "by default 0.02", "default: 0.02", "defaults to ``None``"
_DEFAULT = re.compile(r"[Dd]efaults?(?: to| is|:|=)?\s+(?P<value>\"[^\"]*\"|`+[^`]+`+|[^\s,;)]+)")


def entries_of(docstring: str, *titles: str) -> dict[str, str]:
    """Return what numpydoc sections say of each name, its type line included."""
    parts = _SECTION.split(docstring)
    said: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title not in titles:
            continue
        names: list[str] = []
        for line in body.splitlines():
            entry = _ENTRY.match(line)
            if entry:
                names = [name.strip().lstrip("*") for name in entry["names"].split(",")]
                said.update(dict.fromkeys(names, entry["type"] or ""))
            elif line.startswith(" "):
                said.update({name: f"{said[name]} {line.strip()}" for name in names})
    return said


def stated_default(text: str) -> tuple[bool, Any]:
    """Return whether a Python literal is stated as the default, and which."""
    found = _DEFAULT.search(text)
    if not found:
        return False, None
    value = found["value"].strip("`").rstrip(".:")
    try:
        return True, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return False, None


def defaults_of(function: Function) -> dict[str, ast.expr]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = list(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    pairs += [
        (argument, default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    ]
    return {argument.arg: default for argument, default in pairs}


def arguments_of(function: Function) -> set[str]:
    arguments = function.args
    names = {*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs}
    return {a.arg for a in (*names, arguments.vararg, arguments.kwarg) if a is not None}


def fields_of(node: ast.ClassDef) -> dict[str, ast.expr]:
    return {
        field.target.id: field.value
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and field.value is not None
    }


def lies_in(tree: ast.Module, namespace: dict[str, Any]) -> Iterator[str]:
    """Yield each documented parameter or default that the code contradicts."""
    for node in ast.walk(tree):
        docstring = ast.get_docstring(node) if isinstance(node, ast.ClassDef | Function) else None
        if not docstring:
            continue
        if isinstance(node, Function):
            actual, known = defaults_of(node), arguments_of(node)
        else:
            assert isinstance(node, ast.ClassDef)
            inits = [f for f in node.body if isinstance(f, Function) and f.name == "__init__"]
            actual = defaults_of(inits[0]) if inits else fields_of(node)
            known = arguments_of(inits[0]) if inits else set()
        for name, text in entries_of(docstring, "Parameters", "Attributes").items():
            is_stated, stated = stated_default(text)
            if is_stated and name in actual:
                value = eval(ast.unparse(actual[name]), namespace)
                if value != stated:
                    yield f"{node.name}: {name} is said to default to {stated!r}, it is {value!r}"
        if known:
            undocumented = set(entries_of(docstring, "Parameters")) - known
            for name in sorted(undocumented):
                yield f"{node.name}: there is no parameter {name}"


def public_nodes(tree: ast.Module) -> Iterator[tuple[str, ast.ClassDef | Function]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                for member in node.body:
                    if isinstance(member, Function) and not member.name.startswith("_"):
                        yield f"{node.name}.{member.name}", member


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def each_file(rule: Callable[[Path], None]) -> Callable[[], None]:
    """Make one test of a rule for files; a failure shows the file."""

    def test() -> None:
        for path in FILES:
            rule(path)

    return test


@each_file
def test_the_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "the docstring stands first"


@each_file
def test_everything_public_has_a_docstring(path: Path) -> None:
    tree = ast.parse(path.read_text())
    bare = [
        name
        for name, node in public_nodes(tree)
        if not ast.get_docstring(node)
        and not any("overload" in ast.unparse(mark) for mark in node.decorator_list)
    ]
    assert bare == []


@each_file
def test_docstrings_do_not_lie(path: Path) -> None:
    if path.name == "__main__.py":  # importing it would run it
        return
    module = importlib.import_module(module_name(path))
    assert list(lies_in(ast.parse(path.read_text()), vars(module))) == []


LYING = '''
def measure(x, *, half_width=0.02, rule="precision", seed=None):
    """Measure.

    Parameters
    ----------
    x : float
    half_width : float, default 0.05
        Relative.
    rule : str
        A name, by default ``"paper"``.
    seed : int or None, default None
    colour : str
    """


class Config:
    """Options.

    Attributes
    ----------
    n_trees : int, default 10
    """

    n_trees: int = 100
'''


def test_lies_are_found() -> None:
    assert list(lies_in(ast.parse(LYING), {})) == [
        "measure: half_width is said to default to 0.05, it is 0.02",
        "measure: rule is said to default to 'paper', it is 'precision'",
        "measure: there is no parameter colour",
        "Config: n_trees is said to default to 10, it is 100",
    ]


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("float, default 0.02", (True, 0.02)),
        ("str Defaults to ``None``.", (True, None)),
        ('{"a", "b"}, default "a"', (True, "a")),
        ("int, by default 1e-3.", (True, 1e-3)),
        ("int, default the number of cores", (False, None)),
        ("int", (False, None)),
    ],
)
def test_stated_defaults_are_read(text: str, stated: tuple[bool, Any]) -> None:
    assert stated_default(text) == stated
