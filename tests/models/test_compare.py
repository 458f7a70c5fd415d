from __future__ import annotations

import math
import os
import signal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tvm_adaptive.errors import InvalidOptionError, WorkerDiedError
from tvm_adaptive.models import (
    export,
    largest_difference,
    outputs_agree,
    run_exported,
    time_exported,
    time_network,
)
from tvm_adaptive.workers import device_session
from tvm_adaptive.workers.pool import WorkerPool

FLOATS = arrays(np.float32, 6, elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False))


@given(FLOATS)
def test_outputs_agree_with_themselves(values):
    assert outputs_agree([values], [values])
    assert largest_difference([values], [values]) == (0.0, 0.0)


@given(FLOATS, st.floats(1e-6, 1e6))
def test_agreement_does_not_depend_on_the_unit(values, unit):
    disturbed = values.astype(np.float64) * (1 + 5e-4)
    assert outputs_agree([disturbed * unit], [values.astype(np.float64) * unit])


@pytest.mark.parametrize("position", range(4))
def test_one_wrong_element_is_seen(position):
    reference = np.array([1.0, -2.0, 0.0, 3.0])
    wrong = reference.copy()
    wrong[position] += 0.02
    assert not outputs_agree([wrong], [reference])
    assert largest_difference([wrong], [reference]).max_abs == pytest.approx(0.02)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_agrees(bad):
    broken = np.array([1.0, bad])
    assert not outputs_agree([broken], [broken])
    assert not outputs_agree([broken], [np.ones(2)])
    assert largest_difference([broken], [np.ones(2)]).max_abs == math.inf


@pytest.mark.parametrize("outputs", [[], [np.ones(3)], [np.ones((2, 1))], [np.ones(2)] * 2])
def test_other_shapes_never_agree(outputs):
    assert not outputs_agree(outputs, [np.ones(2)])
    assert largest_difference(outputs, [np.ones(2)]) == (math.inf, math.inf)


def test_relative_difference_leaves_out_zeros():
    difference = largest_difference([np.array([0.5, 3.0])], [np.array([0.0, 2.0])])
    assert difference == (1.0, 0.5)


def test_atol_replaces_the_floor():
    outputs, reference = [np.array([0.0, 1e-5])], [np.array([100.0, 0.0])]
    outputs[0][0] = 100.0
    assert outputs_agree(outputs, reference)
    assert not outputs_agree(outputs, reference, atol=1e-6)


def test_integers_are_equal_but_for_what_rounding_makes_of_a_few():
    classes = np.array([500])
    assert outputs_agree([classes], [classes])
    assert not outputs_agree([classes + 1], [classes])
    pixels = np.arange(200) % 50
    assert outputs_agree([pixels + (np.arange(200) < 2)], [pixels])
    assert not outputs_agree([pixels + (np.arange(200) < 3)], [pixels])
    assert not outputs_agree([pixels + 2 * (np.arange(200) < 1)], [pixels])


def test_time_is_positive_and_checked(case):
    compiled = case.tuned["NHWC"]
    assert time_network(compiled, case.inputs, min_seconds=0.1) > 0
    for value in (0, -1.0, math.nan):
        with pytest.raises(InvalidOptionError, match="min_seconds must be positive but got"):
            time_network(compiled, case.inputs, min_seconds=value)


def test_a_slow_network_is_measured_once(case, tmp_path):
    path = tmp_path / "network.so"
    export(case.tuned["NHWC"], path)
    assert len(time_exported(path, case.inputs, min_seconds=1e-6)) == 1
    assert len(time_exported(path, case.inputs, min_seconds=0.1)) >= 5


def test_export_keeps_the_terminal_clean(case, tmp_path, capfd):
    export(case.tuned["NHWC"], tmp_path / "network.so")
    os.write(2, b"still there")
    assert capfd.readouterr().err == "still there"


def test_a_library_is_loaded_once_as_tvm_never_lets_go_of_it(case, tmp_path):
    path, other = str(tmp_path / "network.so"), str(tmp_path / "other.so")
    export(case.tuned["NHWC"], path)
    export(case.tuned["prepack"], other)
    first = device_session.load_once(path)
    assert device_session.load_once(path) is first
    assert device_session.load_once(other) is not first
    os.replace(other, path)
    assert device_session.load_once(path) is not first, "a new file of the old name"


def test_an_exported_network_runs_in_another_process(case, tmp_path):
    path = str(tmp_path / "network.so")
    export(case.tuned["prepack"], path)
    pool = WorkerPool(1)
    try:
        (outcome,) = pool.map(run_exported, [(path, case.inputs)], timeout_sec=120)
        assert outcome.error is None
        assert outputs_agree(outcome.value, case.reference)
    finally:
        pool.close()


def test_a_crash_there_is_an_error_here(case, tmp_path):
    path = str(tmp_path / "network.so")
    export(case.tuned["NHWC"], path)

    def crash(path, inputs):
        run_exported(path, inputs)
        os.kill(os.getpid(), signal.SIGSEGV)

    pool = WorkerPool(1)
    try:
        (outcome,) = pool.map(crash, [(path, case.inputs)], timeout_sec=120)
    finally:
        pool.close()
    assert isinstance(outcome.error, WorkerDiedError)


def test_libraries_must_be_shared_ones(case, tmp_path):
    with pytest.raises(InvalidOptionError, match=r"path must end in .so or .tar but got"):
        export(case.tuned["NHWC"], tmp_path / "network.zip")
