import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

from tvm_adaptive.values.ranks import average_ranks

FLOATS = st.floats(allow_nan=False, width=32)


@given(st.lists(FLOATS | st.sampled_from([-np.inf, -0.0, 0.0, 1.0]), min_size=1, max_size=40))
def test_ranks_are_those_of_scipy(values):
    np.testing.assert_array_equal(average_ranks(np.array(values)), rankdata(values))


@pytest.mark.parametrize("shape", [(0,), (1,)])
def test_few_values_have_ranks(shape):
    np.testing.assert_array_equal(average_ranks(np.zeros(shape)), np.ones(shape))
