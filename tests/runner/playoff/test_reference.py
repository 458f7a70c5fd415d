"""What a play-off's reference tells of wrong kernels: in the worker's functions, called here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from tvm_adaptive._tvm import Target
from tvm_adaptive.runner.playoff.worker import Kernel, _Reference, check, run_reference
from tvm_adaptive.values.agreement import hides_errors

ROWS, DEPTH, COLUMNS = 16, 576, 32


def quantised(path: Path, dtype: str, n_terms: int = DEPTH) -> Kernel:
    """Build the sum of some products, rounded to bytes as quantised convolutions do."""
    a = te.placeholder((ROWS, DEPTH), dtype, "a")
    b = te.placeholder((DEPTH, COLUMNS), dtype, "b")
    k = te.reduce_axis((0, n_terms), "k")
    wide = "float32"
    total = te.compute(
        (ROWS, COLUMNS),
        lambda i, j: te.sum(a[i, k].astype(wide) * b[k, j].astype(wide), k),
    )

    def to_byte(i, j):  # type: ignore[no-untyped-def]
        number = tirx.round(total[i, j] * tirx.const(3e-4, wide)) + tirx.const(128.0, wide)
        return te.max(te.min(number, tirx.const(255.0, wide)), tirx.const(0.0, wide)).astype(
            "uint8"
        )

    result = te.compute((ROWS, COLUMNS), to_byte)
    mod = tvm.IRModule({"main": te.create_prim_func([a, b, result])})
    tvm.build(mod, target=Target("llvm")).export_library(str(path))
    buffers = ((dtype, (ROWS, DEPTH)), (dtype, (DEPTH, COLUMNS)), ("uint8", (ROWS, COLUMNS)))
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
        (np.arange(32, dtype="float32"), np.full(32, 7, "float32"), False),
        (np.arange(4), np.full(4, 7), False),  # by chance
    ],
)
def test_what_hides_errors(before: np.ndarray, after: np.ndarray, expected: bool) -> None:
    assert hides_errors([before], [after]) == expected
