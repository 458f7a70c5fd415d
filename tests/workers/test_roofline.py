import pytest

from tvm_adaptive.workers.roofline import measure_roofline


def test_a_processor_reaches_something_and_bounds_follow_from_it():
    found = measure_roofline(1)
    # A single core of any processor that runs this: 0.1 GFLOP/s to 10 TFLOP/s, and 0.1 GB/s on.
    assert 1e8 < found.flop_per_sec < 1e13
    assert 1e8 < found.bytes_per_sec < 1e13
    assert found.limit_ms(found.flop_per_sec, 0.0) == pytest.approx(1e3)
    assert found.limit_ms(0.0, 2.0 * found.bytes_per_sec) == pytest.approx(2e3)
