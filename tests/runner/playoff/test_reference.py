"""What a play-off's reference tells of wrong kernels: in the worker's functions, called here."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from tvm_adaptive._tvm import Target
from tvm_adaptive.runner.playoff.worker import (
    Kernel,
    _Reference,
    check,
    run_neighbours,
    run_reference,
)
from tvm_adaptive.values.agreement import hides_errors

ROWS, DEPTH, COLUMNS = 16, 576, 32


def quantised(
    path: Path, dtype: str, n_terms: int = DEPTH, *, backwards: bool = False, step: float = 0.0
) -> Kernel:
    """Build the sum of some products, rounded to bytes as quantised convolutions do.

    With a step, the bytes become floats again.
    """
    a = te.placeholder((ROWS, DEPTH), dtype, "a")
    b = te.placeholder((DEPTH, COLUMNS), dtype, "b")
    k = te.reduce_axis((0, n_terms), "k")
    wide = "float32"

    def at(k):  # type: ignore[no-untyped-def]
        return n_terms - 1 - k if backwards else k

    total = te.compute(
        (ROWS, COLUMNS),
        lambda i, j: te.sum(
            a[i, at(k)].astype(wide) * b[at(k), j].astype(wide),
            k,
        ),
    )

    def to_byte(i, j):  # type: ignore[no-untyped-def]
        number = tirx.round(total[i, j] * tirx.const(3e-4, wide)) + tirx.const(128.0, wide)
        number = te.max(te.min(number, tirx.const(255.0, wide)), tirx.const(0.0, wide))
        byte = number.astype("uint8")
        return byte.astype(wide) * tirx.const(step, wide) if step else byte

    result = te.compute((ROWS, COLUMNS), to_byte)
    mod = tvm.IRModule({"main": te.create_prim_func([a, b, result])})
    tvm.build(mod, target=Target("llvm")).export_library(str(path))
    result_dtype = wide if step else "uint8"
    buffers = ((dtype, (ROWS, DEPTH)), (dtype, (DEPTH, COLUMNS)), (result_dtype, (ROWS, COLUMNS)))
    return Kernel(str(path), "cpu", buffers)


def test_small_values_do_not_hide_a_sum_that_lacks_terms(tmp_path: Path) -> None:
    right = quantised(tmp_path / "right.so", "float32")
    wrong = quantised(tmp_path / "wrong.so", "float32", DEPTH // 2)
    path = str(tmp_path / "reference")
    run_reference(right, 0, path)
    reference = _Reference.read(path)
    assert reference.scale > 1.0
    assert len(np.unique(reference.outputs[2])) > 3
    assert check(right, 0, path, 1e-4, None).problem is None
    assert check(wrong, 0, path, 1e-4, None).problem is not None


def test_what_is_rounded_and_a_float_again_may_round_to_the_next_number(tmp_path: Path) -> None:
    """Another order of additions moves a few of some thousands to the next step."""
    kernels = {
        name: quantised(tmp_path / f"{name}.so", "float32", n_terms, backwards=order, step=0.02)
        for name, n_terms, order in (
            ("right", DEPTH, False),
            ("backwards", DEPTH, True),
            ("wrong", DEPTH - 40, False),
        )
    }
    path, rtol = str(tmp_path / "reference"), 2e-5
    run_reference(kernels["right"], 0, path)
    assert _Reference.read(path).scale > 1.0
    run_neighbours(kernels["right"], 0, path, rtol)
    assert check(kernels["backwards"], 0, path, rtol, None).problem is None
    assert check(kernels["wrong"], 0, path, rtol, None).problem is not None


def test_a_disk_that_fills_up_leaves_the_reference_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, path = quantised(tmp_path / "kernel.so", "float32"), tmp_path / "reference"
    run_reference(kernel, 0, str(path))
    before, write_bytes = path.read_bytes(), Path.write_bytes

    def write_half(self: Path, data: bytes) -> int:
        write_bytes(self, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "no space is left")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match="no space"):
        run_neighbours(kernel, 0, str(path), 2e-5)
    assert path.read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} == {"kernel.so", "reference"}
    assert check(kernel, 0, str(path), 2e-5, None).problem is None


def test_half_precision_is_not_scaled(tmp_path: Path) -> None:
    """Sums of larger values would overflow."""
    path = str(tmp_path / "reference")
    run_reference(quantised(tmp_path / "half.so", "float16"), 0, path)
    assert _Reference.read(path).scale == 1.0


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (np.arange(32, dtype="int8"), np.full(32, 7, "int8"), True),
        (np.arange(32, dtype="int8"), np.arange(32, dtype="int8") // 8, False),
        (np.full(32, 7, "int8"), np.full(32, 7, "int8"), False),  # only read
        (np.arange(32, dtype="float32"), np.full(32, 7, "float32"), True),
        (np.zeros(32, "float32"), np.arange(32, dtype="float32"), False),
        (np.arange(4), np.full(4, 7), False),  # by chance
    ],
)
def test_what_hides_errors(before: np.ndarray, after: np.ndarray, expected: bool) -> None:
    assert hides_errors([before], [after]) == expected
