"""Modules of the user's own that are programs, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.frontend import load

LOOKS = """
import sys

assert sys.argv == ["looks"], sys.argv

def make():
    assert sys.argv == ["looks"], sys.argv
    sys.exit("no weights here")
"""


@pytest.fixture
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "looks.py").write_text(LOOKS)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("looks", None)


@pytest.mark.usefixtures("_programs")
def test_a_module_that_ends_the_program_is_a_message() -> None:
    text = "leaves of leaves:make cannot be imported: SystemExit: 3"
    with pytest.raises(InvalidOptionError, match=text):
        load("leaves:make")


@pytest.mark.usefixtures("_programs")
def test_a_module_does_not_see_the_arguments_of_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["/usr/bin/tvm-adaptive", "tune", "looks:make"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(InvalidOptionError, match="looks:make failed: SystemExit: no weights here"):
        load("looks:make")
    assert sys.argv is arguments
