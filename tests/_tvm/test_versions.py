from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import tvm_adaptive
from tvm_adaptive._tvm.versions import FIX, check_versions, installed_version, release
from tvm_adaptive.errors import AdaptiveError, UnsupportedVersionError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("tvm", ["0.26.0", "0.27.0", "0.27.0.post1"])
@pytest.mark.parametrize("ffi", ["0.1.14.post0", "0.1.14.post1"])
def test_good_pairs_pass(tvm: str, ffi: str) -> None:
    check_versions(tvm, ffi)


@pytest.mark.parametrize(
    ("tvm", "ffi"),
    [
        ("0.27.0.post1", "0.1.15.post1"),
        ("0.27.0.post1", "0.1.15.post2"),
        ("0.26.0", "0.1.15"),
        ("0.27.0", "0.1.13.post3"),
        ("0.25.0", "0.1.14.post1"),
        ("0.27.0", "0.1.14"),
        ("0.28.0", "0.1.14.post1"),
        ("0.9.0", "0.1.14.post1"),
        ("1.0", "0.1.14.post1"),
        ("unknown", "0.1.14.post1"),
        (None, "0.1.14.post1"),
        ("0.27.0", None),
    ],
)
def test_bad_pairs_say_what_to_install(tvm: str | None, ffi: str | None) -> None:
    with pytest.raises(UnsupportedVersionError, match="To mend it: pip install") as caught:
        check_versions(tvm, ffi)
    text = str(caught.value)
    assert (tvm or "(not installed)") in text
    assert (ffi or "(not installed)") in text
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, AdaptiveError)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("0.1.14.post1", (0, 1, 14)), ("0.27.0", (0, 27, 0)), ("0.28.dev0", (0, 28)), ("x", ())],
)
def test_release_is_the_leading_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers


def test_what_is_not_installed_has_no_version() -> None:
    assert installed_version("pytest") == metadata.version("pytest")
    assert installed_version("no-such-distribution") is None


def test_the_cure_is_what_the_package_depends_on() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    requirements = FIX.split('"')[1::2]
    assert len(requirements) == 2
    for requirement in requirements:
        assert f'"{requirement}"' in declared


def test_the_package_version_stands_in_one_more_place_only() -> None:
    assert f'version = "{tvm_adaptive.__version__}"' in (ROOT / "pyproject.toml").read_text()


def run_with_a_bad_pair(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    pretend_installed(folder, "apache_tvm_ffi", "0.1.15.post2")
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_bad_pair_is_an_ordinary_import_error(tmp_path: Path) -> None:
    done = run_with_a_bad_pair(tmp_path, "-c", "import tvm_adaptive")
    assert done.returncode == 1  # a traceback; a crash would be negative
    assert "UnsupportedVersionError" in done.stderr
    assert "0.1.15.post2" in done.stderr
    assert FIX in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "head"),
    [
        (["doctor"], 1, "PROBLEM  versions  "),
        (["tune", "te:GMM"], 2, "tvm-adaptive: error: "),
    ],
)
def test_a_bad_pair_ends_a_command_with_one_line(
    arguments: list[str], code: int, head: str, tmp_path: Path
) -> None:
    done = run_with_a_bad_pair(tmp_path, "-m", "tvm_adaptive", *arguments)
    assert done.returncode == code, done.stderr
    (line,) = (done.stdout if code == 1 else done.stderr).splitlines()
    assert line.startswith(head)
    assert "0.1.15.post2" in line
    assert line.endswith(FIX)
    assert "Traceback" not in done.stderr


def pretend_installed(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    (info / "METADATA").write_text(text)
