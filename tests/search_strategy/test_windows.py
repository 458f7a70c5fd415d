"""The model of windows whose places share no operand: laws, and timings that were recorded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.stats import spearmanr

from tvm_adaptive.search_strategy.analytical import forecast_cycles
from tvm_adaptive.search_strategy.tilings import Processor, Tilings
from tvm_adaptive.search_strategy.windows import has_windows, window_cycles

AVX512 = Processor(lanes=16, n_registers=32, n_threads=2)


def tilings(
    height=(2, 7, 1, 1),
    width=(2, 1, 7, 1),
    channels=(2, 6, 1, 16),
    window=((3, 1), (1, 3)),
    unrolled=64,
):
    """Return one tiling of a depthwise convolution of one image."""
    spatial = np.array([[(1, 1, 1, 1), height, width, channels]])
    return Tilings(spatial, np.array([[*window, (1, 1)]]), np.array([unrolled]))


def cycles(processor=AVX512, **how):
    return float(window_cycles(tilings(**how), processor)[0])


def test_places_of_a_window_that_are_written_out_know_the_border():
    # Seven places in a row, and three of a window: registers hold the seven sums in both.
    known, unknown = (cycles(width=(2, 1, 1, 7), unrolled=n) for n in (64, 16))
    assert known < 0.8 * unknown


def test_one_sum_waits_for_itself():
    # As many results in seven times as many tiles.
    alone, seven = (cycles(width=(2, 7 // n, 1, n)) for n in (1, 7))
    assert alone > 2.0 * seven


def test_sums_stay_in_registers_through_loops_of_the_window():
    # With a loop over places between them, sums are stored for each row of the window.
    held = cycles(width=(2, 7, 1, 1), window=((3, 1), (1, 3)), unrolled=16)
    stored = cycles(width=(2, 1, 7, 1), window=((3, 1), (1, 3)), unrolled=16)
    assert held < stored


def test_more_sums_than_registers_cost():
    few, many = (cycles(width=(1, 14 // n, 1, n), height=(2, 1, 1, 7)) for n in (2, 14))
    assert few < many


def test_places_that_evict_each_other_cost():
    # Of 256 channels, places are 1024 bytes apart: the first cache has four sets for them.
    wide, narrow = (
        tilings(width=(2, 1, 7, 1), channels=(1, n // 16, 1, 16), height=(2, 1, 7, 1))
        for n in (256, 272)
    )
    a, b = (float(window_cycles(each, AVX512)[0]) for each in (wide, narrow))
    assert a / 256 > 1.1 * b / 272


def test_threads_have_rows_of_their_own_rather_than_channels():
    assert cycles(height=(2, 7, 1, 1), channels=(1, 12, 1, 16)) < cycles(
        height=(1, 14, 1, 1), channels=(2, 6, 1, 16)
    )


def test_more_threads_take_less_time():
    alone = dataclasses.replace(AVX512, n_threads=1)
    assert cycles(alone) == pytest.approx(2 * cycles())


@pytest.mark.parametrize(
    ("spatial", "reduction", "expected"),
    [
        ([1, 14, 14, 64], [3, 3, 1], True),
        ([1, 100, 64], [5], True),
        ([1, 7, 7, 64], [], False),  # element by element
        ([1, 64], [512], False),  # a product with a vector
        ([1, 1, 1, 64], [7, 7], False),  # all of an image is one window
    ],
)
def test_which_loops_are_windows(spatial, reduction, expected):
    parts = np.array([[(1, 1, 1, n) for n in spatial]])
    reduced = np.array([[(n, 1) for n in reduction]], dtype=np.int64).reshape(1, -1, 2)
    found = Tilings(parts, reduced, np.array([64]))
    assert has_windows(found) == expected
    options = {"shares_operands": False, "reads_windows": True}
    assert np.isfinite(forecast_cycles(found, AVX512, **options)).all()


# Microseconds on two cores of an Emerald Rapids, padding computed in place: heights, widths,
# channels, windows, and how many steps are written out.
RECORDED = {
    "5 x 5, 256 channels, 50 x 38": [
        (103.7, (5, 2, 5, 1), (2, 19, 1, 1), (8, 1, 2, 16), ((1, 5), (5, 1)), 512),
        (154.1, (10, 1, 5, 1), (1, 38, 1, 1), (2, 4, 2, 16), ((5, 1), (5, 1)), 64),
        (157.3, (5, 5, 2, 1), (19, 1, 1, 2), (1, 8, 2, 16), ((5, 1), (1, 5)), 64),
        (219.1, (5, 1, 1, 10), (19, 1, 1, 2), (2, 8, 1, 16), ((5, 1), (5, 1)), 512),
        (296.5, (50, 1, 1, 1), (1, 2, 19, 1), (2, 4, 2, 16), ((1, 5), (5, 1)), 64),
        (336.4, (1, 25, 2, 1), (1, 2, 19, 1), (2, 1, 4, 32), ((5, 1), (1, 5)), 64),
        (427.3, (2, 1, 5, 5), (2, 19, 1, 1), (1, 16, 1, 16), ((5, 1), (5, 1)), 64),
        (517.6, (2, 1, 1, 25), (1, 38, 1, 1), (16, 1, 1, 16), ((5, 1), (5, 1)), 64),
        (624.6, (1, 25, 1, 2), (1, 19, 2, 1), (4, 2, 2, 16), ((5, 1), (1, 5)), 64),
        (747.2, (2, 1, 5, 5), (1, 1, 19, 2), (2, 1, 8, 16), ((5, 1), (5, 1)), 64),
    ],
    "3 x 3, 384 channels, 14 x 14": [
        (6.8, (1, 7, 1, 2), (1, 2, 7, 1), (3, 8, 1, 16), ((3, 1), (1, 3)), 64),
        (7.8, (2, 1, 7, 1), (2, 7, 1, 1), (6, 4, 1, 16), ((1, 3), (3, 1)), 64),
        (8.8, (1, 7, 1, 2), (1, 7, 2, 1), (3, 4, 2, 16), ((1, 3), (3, 1)), 512),
        (11.9, (14, 1, 1, 1), (2, 7, 1, 1), (1, 3, 8, 16), ((3, 1), (3, 1)), 512),
        (13.2, (1, 2, 1, 7), (7, 1, 2, 1), (2, 6, 2, 16), ((1, 3), (3, 1)), 64),
        (16.1, (1, 1, 2, 7), (1, 1, 14, 1), (2, 6, 2, 16), ((3, 1), (1, 3)), 64),
        (17.3, (1, 1, 1, 14), (1, 7, 1, 2), (2, 12, 1, 16), ((3, 1), (3, 1)), 64),
        (20.8, (1, 1, 7, 2), (1, 2, 1, 7), (1, 3, 4, 32), ((1, 3), (3, 1)), 64),
        (30.4, (1, 1, 1, 14), (1, 1, 7, 2), (3, 2, 4, 16), ((3, 1), (3, 1)), 512),
    ],
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_tilings_are_ranked(name):
    rows = RECORDED[name]
    kinds = "height", "width", "channels", "window", "unrolled"
    forecast = [cycles(**dict(zip(kinds, how, strict=True))) for _, *how in rows]
    assert spearmanr([microseconds for microseconds, *_ in rows], forecast)[0] > 0.6
