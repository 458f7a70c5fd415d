"""Views of contiguous tensors, beside numpy's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.models.rewrites.strided_view import StridedView

Array = npt.NDArray[Any]


def numbers_of(view: StridedView) -> Array:
    """Return the numbers of a view of 0, 1, 2, ... by its strides."""
    found = np.full(view.extents, view.offset)
    for axis, (n, stride) in enumerate(zip(view.extents, view.strides, strict=True)):
        shape = [n if i == axis else 1 for i in range(len(view.extents))]
        found = found + stride * np.arange(n).reshape(shape)
    return found


def read(view: StridedView) -> Array:
    """Return the same by the axes of a source."""
    axes = view.axes()
    assert axes is not None
    assert math.prod(axis.extent for axis in axes) == view.n_numbers
    source = np.arange(view.n_numbers).reshape([axis.extent for axis in axes])
    places = np.indices(view.extents)
    zeros = np.zeros(view.extents, dtype=int)
    indices = [
        axis.begin + (zeros if axis.of_view is None else places[axis.of_view]) for axis in axes
    ]
    return source[tuple(indices)] if indices else source.reshape(view.extents)


@st.composite
def moves(draw: st.DrawFn) -> tuple[StridedView, Array]:
    """Draw a view and the same of an array."""
    extents = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    view, array = StridedView.of(extents), np.arange(math.prod(extents)).reshape(extents)
    for kind in draw(st.lists(st.sampled_from(["transpose", "slice", "take", "shape"]))):
        if kind == "transpose":
            axes = draw(st.permutations(range(array.ndim)))
            view, array = view.transposed(axes), array.transpose(axes)
        elif kind == "shape":
            first = draw(st.sampled_from([n for n in (1, 2, 3, 4) if array.size % n == 0]))
            shape = [first, array.size // first]
            found = view.reshaped(shape)
            # numpy copies in more cases than in which strides vary.
            if found is not None:
                view, array = found, array.reshape(shape)
        elif array.ndim > 1 or kind == "slice":
            axis = draw(st.integers(0, array.ndim - 1))
            begin = draw(st.integers(0, array.shape[axis] - 1))
            if kind == "take":
                view, array = view.taken(axis, begin), array.take(begin, axis)
            else:
                n = draw(st.integers(1, array.shape[axis] - begin))
                view = view.sliced(axis, begin, n)
                array = array.take(range(begin, begin + n), axis)
    return view, array


@given(moves())
def test_views_have_the_numbers_that_numpy_moves(found: tuple[StridedView, Array]) -> None:
    view, array = found
    assert view.extents == array.shape
    assert (numbers_of(view) == array).all()
    if view.axes() is not None:
        assert (read(view) == array).all()


def test_heads_of_attention_are_read_where_they_are() -> None:
    # Queries, keys and values of five tokens with two heads of four numbers.
    view: StridedView | None = StridedView.of((5, 24))
    for shape in ((5, 3, 2, 4), (1, 5, 1, 3, 8), (5, 3, 2, 4)):
        assert view is not None
        view = view.reshaped(shape)
    assert view is not None
    keys = view.taken(1, 1).transposed([1, 0, 2])
    assert (keys.extents, keys.strides, keys.offset) == ((2, 5, 4), (4, 24, 1), 8)
    axes = keys.axes()
    assert axes is not None
    found = [(axis.extent, axis.begin, axis.of_view) for axis in axes]
    assert found == [(5, 0, 1), (6, 2, 0), (4, 0, 2)]


def test_a_view_across_rows_has_no_axes() -> None:
    view = StridedView.of((24,)).sliced(0, 2, 12).reshaped((3, 4))
    assert view is not None
    assert view.axes() is None


@pytest.mark.parametrize(
    ("axes", "shape", "is_view"),
    [([1, 0], (6,), False), ([0, 1], (6,), True), ([1, 0], (3, 1, 2), True)],
)
def test_a_reshape_that_has_to_copy_is_no_view(
    axes: list[int], shape: tuple[int, ...], is_view: bool
) -> None:
    assert (StridedView.of((2, 3)).transposed(axes).reshaped(shape) is not None) == is_view
