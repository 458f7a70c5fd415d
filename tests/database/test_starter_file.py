from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tvm_adaptive.database.starter_file import (
    STEP,
    StarterHeader,
    StarterTask,
    read_starter,
    write_starter,
)
from tvm_adaptive.errors import StoreError

HEADER = StarterHeader(
    instruction_set="avx2",
    n_threads=2,
    tvm="0.27.0",
    processor="some processor",
    mcpu="x86-64-v3",
    date="2026-01-01",
    command="make",
    workloads=("one", "two"),
)
TRACE = [[["SamplePerfectTile", [], [4, 16], ["l0", "l1"]]], [[0, [2, 4]]]]


def task(family: str = "matmul", n: int = 5, width: int = 7) -> StarterTask:
    rng = np.random.default_rng(n)
    rows = rng.uniform(0, 40, (n, width)).astype(np.float32)
    rows[:, 0] = 0
    rows[:, 1:3] = 12.5
    return StarterTask(
        family=family,
        workload_key="0123456789abcdef",
        name=f"fused_{family}",
        records=((TRACE, 1e-3), (TRACE, 2e-3)),
        rows=rows,
        seconds=rng.uniform(1e-5, 1e-3, n),
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("starter") / "avx2-2.json.xz"
    write_starter(path, HEADER, [task(), task("conv2d_nhwc", 1), task("softmax", 0)])
    return path


def changed(path: Path, tmp_path: Path, number: int, **fields: Any) -> Path:
    """Return a copy of a file with some fields of a line changed."""
    lines = [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]
    lines[number].update(fields)
    copy = tmp_path / path.name
    copy.write_bytes(lzma.compress("\n".join(map(json.dumps, lines)).encode()))
    return copy


def test_what_is_written_is_read_again(path: Path) -> None:
    header, tasks = read_starter(path)
    assert header == HEADER
    assert [each.family for each in tasks] == ["conv2d_nhwc", "matmul", "softmax"]
    read, given = tasks[1], task()
    assert read.records == given.records
    assert (read.workload_key, read.name) == (given.workload_key, given.name)
    np.testing.assert_allclose(read.seconds, given.seconds, rtol=1e-3)
    np.testing.assert_allclose(read.rows, given.rows, atol=STEP / 2)
    assert read.rows.dtype == np.float32
    assert tasks[2].rows.shape == (0, 7)


def test_other_families_are_not_unpacked(path: Path) -> None:
    _, tasks = read_starter(path, {"matmul"}.__contains__)
    assert [each.family for each in tasks] == ["matmul"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_damage_anywhere_is_an_error_of_our_own_or_does_no_harm(
    path: Path, tmp_path: Path, data: st.DataObject
) -> None:
    raw = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        del raw[place:]
    else:
        raw[place] ^= data.draw(st.integers(1, 255))
    copy = tmp_path / path.name
    copy.write_bytes(bytes(raw))
    with pytest.raises(StoreError, match=path.name):
        read_starter(copy)


@pytest.mark.parametrize("fields", [{"format": 2}, {"step": 1.0}])
def test_another_format_is_refused(path: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match="another format"):
        read_starter(changed(path, tmp_path, 0, **fields))


def test_a_missing_file_is_an_error_of_our_own(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        read_starter(tmp_path / "avx2-2.json.xz")
