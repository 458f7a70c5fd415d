from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.models.frontend.converters.fourier import dft_matrix


def transformed(x, *, is_inverse=False, is_onesided=False):
    """Return what the matrix makes of real or complex numbers."""
    parts = np.stack([x.real, x.imag], -1) if np.iscomplexobj(x) else x[:, None]
    matrix = dft_matrix(len(x), parts.shape[1], is_inverse=is_inverse, is_onesided=is_onesided)
    pairs = (parts.reshape(-1) @ matrix).reshape(-1, 2)
    return pairs[:, 0] + 1j * pairs[:, 1]


@given(st.integers(1, 40), st.integers(0, 100))
def test_the_matrices_are_numpys_transforms(n, seed):
    rng = np.random.default_rng(seed)
    real, imaginary = rng.standard_normal((2, n))
    both = real + 1j * imaginary
    assert np.allclose(transformed(real), np.fft.fft(real))
    assert np.allclose(transformed(both), np.fft.fft(both))
    assert np.allclose(transformed(real, is_onesided=True), np.fft.rfft(real))
    assert np.allclose(transformed(transformed(both), is_inverse=True), both)


def test_a_matrix_that_would_not_fit_is_refused():
    with pytest.raises(ValueError, match="4097 elements are more than 4096"):
        dft_matrix(4097, 1, is_inverse=False, is_onesided=True)


def test_transforms_of_parts_of_an_axis(compare, onnx):
    make = onnx.helper.make_node
    x = np.random.default_rng(0).standard_normal((2, 6, 3, 1)).astype("float32")
    both = np.random.default_rng(1).standard_normal((2, 5, 2)).astype("float32")
    signal = np.random.default_rng(2).standard_normal((2, 10, 1)).astype("float32")
    weights = {"four": np.int64(4), "eight": np.int64(8), "axis": np.int64(1), "step": np.int64(3)}
    nodes = [
        make("DFT", ["x", "four", "axis"], ["cut"], onesided=1),
        make("DFT", ["x", "eight", "axis"], ["longer"]),
        make("DFT", ["both"], ["back"], inverse=1),
        make("STFT", ["signal", "step", "", "four"], ["frames"], onesided=0),
    ]
    compare(nodes, {"x": x, "both": both, "signal": signal}, weights, opset=20)


def test_what_cannot_be_converted_says_why(refusal, onnx):
    make = onnx.helper.make_node
    x = {"x": np.ones((1, 8, 2), "float32")}
    node = make("DFT", ["x"], ["y"], inverse=1, onesided=1)
    assert "an inverse transform of one side" in refusal([node], x, {}, opset=20)
    step = {"step": np.int64(2)}
    node = make("STFT", ["x", "step"], ["y"])
    assert "complex signals are not supported" in refusal([node], x, step)
    real = {"x": np.ones((1, 8, 1), "float32")}
    assert "neither a window nor a frame_length" in refusal([node], real, step)
