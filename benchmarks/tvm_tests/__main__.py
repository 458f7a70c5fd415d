"""Run TVM's own tests of MetaSchedule twice, with stock's parts and with ours, and compare.

    git clone --depth 1 https://github.com/apache/tvm
    python -m benchmarks.tvm_tests tvm/tests/python --out tests.json

Each file is run in a process of its own. The same command continues ``tests.json``; ``--again``
runs the files anew that ``--files`` names. ``--table`` only prints the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import markdown
from benchmarks.tvm_tests.plugin import (
    EXCLUDED,
    EXCLUDED_TESTS,
    OURS,
    PASSED,
    STOCK,
    UNFINISHED,
    TestLog,
    read,
)

# What belongs to MetaSchedule: its folder, and the tests of its functions for networks.
FILES = ("s_tir/meta_schedule/test_*.py", "relax/test_*meta_schedule*.py")
# The longest file tunes for some minutes on a busy machine.
LIMIT_SEC = 900.0
# The intrinsics of all backends take 12 to 20 s of CPU to import. The processes of the tests are
# forks of this one, which has done so. Workers of stock's builder do so for each batch, within a
# candidate's 30 s; they need none of them to compile for a CPU, so that theirs are empty.
_INTRINSICS = "tvm.s_tir.tensor_intrin"
_IN_WORKERS = f"import sys, types\nsys.modules['{_INTRINSICS}'] = types.ModuleType('empty')\n"

Results = dict[str, dict[str, dict[str, dict[str, Any]]]]  # file -> side -> test -> outcome


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="TVM's tests/python")
    parser.add_argument("--out", type=Path, required=True, help="JSON with all outcomes")
    parser.add_argument("--files", nargs="+", default=FILES, help="patterns within the folder")
    parser.add_argument("--again", action="store_true", help="also what has been run before")
    parser.add_argument("--limit", type=float, default=LIMIT_SEC, help="seconds per file")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    files: Results = found.setdefault("files", {})
    if not options.table:
        found["versions"] = _versions(options.folder)
        paths = sorted(path for glob in options.files for path in options.folder.glob(glob))
        for side in (STOCK, OURS):
            # For all processes of this side, which are forks of this one.
            importlib.import_module(_INTRINSICS if side == STOCK else "benchmarks.tvm_tests.parts")
            for path in paths:
                name = path.relative_to(options.folder).as_posix()
                if side in files.get(name, {}) and not options.again:
                    continue
                start_sec = time.monotonic()
                files.setdefault(name, {})[side] = tests = run(path, side, options.limit)
                options.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
                outcomes = dict(Counter(test["outcome"] for test in tests.values()))
                seconds = time.monotonic() - start_sec
                print(f"{name} {side} {seconds:.0f} s {outcomes}", flush=True)
    print(table(files), excluded_table(files), sep="\n")


def run(path: Path, side: str, limit_sec: float) -> dict[str, dict[str, Any]]:
    """Run a file in a process of its own; return the outcome of each test.

    Of a file that crashes, or takes longer than the limit, the tests so far count; the others
    are unfinished.
    """
    with tempfile.TemporaryDirectory(prefix="tvm-tests-") as folder:
        log = Path(folder) / "log.jsonl"
        context = multiprocessing.get_context("fork")  # which has imported what it needs
        process = context.Process(target=_run, args=(path, side, log))
        process.start()
        try:
            process.join(limit_sec)
        finally:
            # It leads a group of those that it started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        return read(log)


def _run(path: Path, side: str, log: Path) -> None:
    os.setsid()
    with open(log.parent / "output", "w", encoding="utf-8") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    (log.parent / "sitecustomize.py").write_text(_IN_WORKERS)
    paths = [str(log.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["TMPDIR"] = tempfile.tempdir = str(log.parent)
    os.chdir(log.parent)
    # Without what collects the log: MetaSchedule's own set-up of logging fails with its handlers.
    off = ("-p", "no:cacheprovider", "-p", "no:logging")
    own = ("-c", os.devnull, "--rootdir", str(path.parent.resolve()), *off)
    pytest.main([*own, str(path.resolve())], plugins=[TestLog(log, side)])


def _versions(folder: Path) -> dict[str, str]:
    """Return the versions of TVM, of its tests and of Python."""
    command = ["git", "-C", str(folder), "log", "-1", "--format=%h of %cs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {
        "apache-tvm": metadata.version("apache-tvm"),
        "python": platform.python_version(),
        "tests": done.stdout.strip() or "unknown",
    }


def table(files: Results) -> str:
    """Return the table of the files whose tests make replaced parts, and one row for the rest."""
    head = ["file", "tests", "with ours", "stock passes", "ours passes", "excluded"]
    rows: list[list[str]] = []
    others: Results = {}
    for name, sides in sorted(files.items()):
        if _n_with_parts(sides) or _n(sides, OURS, EXCLUDED) or _only_ours_fails(sides):
            rows.append(_row(f"`{name}`", [sides]))
        else:
            others[name] = sides
    rows += [_row(f"{len(others)} files that make none of the parts", list(others.values()))]
    rows += [_row("all", list(files.values()))]
    return markdown([*head, "only ours fails"], rows) + "\n"


def excluded_table(files: Results) -> str:
    """Return the table of the tests that are excluded, by their reason."""
    found: dict[str, list[str]] = {}
    for sides in files.values():
        for test, result in sides.get(OURS, {}).items():
            if result["outcome"] == EXCLUDED:
                found.setdefault(EXCLUDED_TESTS[test.partition("[")[0]], []).append(f"`{test}`")
    rows = [[reason, ", ".join(tests)] for reason, tests in found.items()]
    return markdown(["excluded, as the test", "tests"], rows) + "\n"


def _row(name: str, several: Sequence[dict[str, dict[str, dict[str, Any]]]]) -> list[str]:
    counts = [
        sum(len(sides.get(STOCK, {})) for sides in several),
        sum(map(_n_with_parts, several)),
        sum(_n(sides, STOCK, PASSED) for sides in several),
        sum(_n(sides, OURS, PASSED) for sides in several),
        sum(_n(sides, OURS, EXCLUDED) for sides in several),
    ]
    fails = "; ".join(text for sides in several for text in _only_ours_fails(sides))
    return [name, *map(str, counts), fails]


def _n(sides: dict[str, dict[str, dict[str, Any]]], side: str, outcome: str) -> int:
    return sum(result["outcome"] == outcome for result in sides.get(side, {}).values())


def _n_with_parts(sides: dict[str, dict[str, dict[str, Any]]]) -> int:
    return sum(bool(result.get("parts")) for result in sides.get(OURS, {}).values())


def _only_ours_fails(sides: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Return the tests that stock passes and ours neither passes nor leaves out, and why."""
    ours = sides.get(OURS, {})
    missing = {"outcome": UNFINISHED}
    bad = [
        (test, ours.get(test, missing))
        for test, result in sides.get(STOCK, {}).items()
        if result["outcome"] == PASSED
        and ours.get(test, missing)["outcome"] not in (PASSED, EXCLUDED)
    ]
    return [f"`{test}`: {result.get('error', result['outcome'])}" for test, result in bad]


if __name__ == "__main__":
    main()
