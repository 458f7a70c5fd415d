"""What no kernel can be faster than."""

from __future__ import annotations

import pytest

from tvm_adaptive.values.roofline import fastest_believable_sec


def test_more_work_takes_longer_and_more_cores_take_less() -> None:
    assert fastest_believable_sec(2e9, 2, 32) == 2 * fastest_believable_sec(1e9, 2, 32)
    assert fastest_believable_sec(1e9, 4, 32) == fastest_believable_sec(1e9, 2, 32) / 2


def test_wider_operands_take_longer() -> None:
    secs = [fastest_believable_sec(1e9, 2, bits) for bits in (4, 8, 16, 32, 64)]
    assert secs == sorted(secs)
    assert secs[0] == secs[1]
    assert secs[-1] == secs[-2]


def test_where_nothing_is_known_anything_is_believed() -> None:
    assert fastest_believable_sec(1e12, None, 32) == 0.0


@pytest.mark.parametrize(
    ("flop", "n_cores", "seconds"),
    [
        # Square products of 512 and 1,024 on one core of a Xeon 8280 (AVX-512, some
        # 110 GFLOP/s, oneDNN's published figures) and two of an EPYC (160 GFLOP/s).
        (2 * 512**3, 1, 2.4e-3),
        (2 * 1024**3, 2, 13e-3),
    ],
)
def test_the_best_kernels_are_believed(flop: float, n_cores: int, seconds: float) -> None:
    assert fastest_believable_sec(flop, n_cores, 32) < seconds / 2


def test_a_call_that_does_nothing_is_not_believed() -> None:
    # 0.1 us is what calling an empty kernel takes; the convolution is one of ResNet-18's.
    assert fastest_believable_sec(231e6, 64, 32) > 1e-7
