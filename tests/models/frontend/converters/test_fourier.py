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
