"""Exported networks: their timing, and what a worker that runs them may do."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from tvm import relax

from tests.models.networks import module_of, network_of
from tvm_adaptive._tvm import VirtualMachine
from tvm_adaptive.errors import InvalidOptionError, WorkerDiedError
from tvm_adaptive.models import (
    compile_network,
    export,
    outputs_agree,
    prepare,
    run_exported,
    try_exported,
)
from tvm_adaptive.models.inference import CompiledModel
from tvm_adaptive.models.network import network_of_relax
from tvm_adaptive.tuning.manifest import interface_of
from tvm_adaptive.workers import device_session, scratch
from tvm_adaptive.workers.pool import WorkerPool


@pytest.fixture(scope="module")
def library(case, tmp_path_factory):
    path = tmp_path_factory.mktemp("library") / "network.so"
    export(case.tuned["NHWC"], path)
    return str(path)


class Calls:
    """Counts the repeats that the virtual machine's timer is asked for."""

    def __init__(self, monkeypatch):
        self.repeats = []
        time_evaluator = VirtualMachine.time_evaluator

        def counted(machine, *args, repeat, **options):
            self.repeats.append(repeat)
            return time_evaluator(machine, *args, repeat=repeat, **options)

        monkeypatch.setattr(VirtualMachine, "time_evaluator", counted)


def test_a_quick_network_is_measured_several_times(case, library, monkeypatch):
    calls = Calls(monkeypatch)
    # A second: on a busy machine, loading the network's code may take a tenth.
    outputs, seconds = try_exported(library, case.inputs, min_seconds=1.0)
    assert outputs_agree(outputs, case.reference)
    assert 0 < seconds < 1
    assert calls.repeats[0] == 1
    assert calls.repeats[1] >= 5


def test_a_slow_network_is_measured_once(case, library, monkeypatch):
    calls = Calls(monkeypatch)
    assert try_exported(library, case.inputs, min_seconds=1e-6)[1] > 0
    assert calls.repeats == []
    # The first call to a device elsewhere includes the transfer.
    monkeypatch.setattr(device_session, "is_elsewhere", lambda: True)
    assert try_exported(library, case.inputs, min_seconds=1e-6)[1] > 0
    assert calls.repeats == [1]


def test_export_keeps_the_terminal_clean(case, tmp_path, capfd):
    compiled = case.tuned["NHWC"]
    capfd.readouterr()  # what making the case wrote
    export(compiled, tmp_path / "network.so")
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


def test_a_library_is_loaded_where_its_copy_stays_until_it_is_released(
    library, tmp_path, monkeypatch
):
    """As on NFS, which renames a file that is in use, and does not remove its folder."""
    path, other = str(tmp_path / "network.so"), str(tmp_path / "other.so")
    for name in (path, other):
        shutil.copyfile(library, name)
    first = device_session.load_once(path)
    os.replace(other, path)
    unlink = os.unlink

    def rename(name, *, dir_fd=None):
        name = Path(name)
        if name.name == ".nfs1":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if name.name != "network.so":
            return unlink(name, dir_fd=dir_fd)
        return os.rename(name, name.with_name(".nfs1"), src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", rename)
    monkeypatch.setattr(scratch, "_REMOVE_TRIES", 1)
    assert device_session.load_once(path) is not first


def adding(addend):
    """Return a network that adds a number to a vector."""
    number = relax.const(addend, "float32")
    return network_of({"x": (4,)}, lambda _emit, x: relax.op.add(x, number))


def test_a_library_that_takes_anothers_place_is_the_one_that_runs(case, tmp_path):
    path, other = str(tmp_path / "network.so"), str(tmp_path / "other.so")
    for name, addend in ((path, 1.0), (other, 2.0)):
        export(compile_network(prepare(adding(addend), case.target), None, case.target), name)
    inputs = [np.zeros(4, np.float32)]
    np.testing.assert_array_equal(run_exported(path, inputs)[0], 1.0)
    os.replace(other, path)
    for _ in range(2):
        np.testing.assert_array_equal(run_exported(path, inputs)[0], 2.0)
        model = CompiledModel(path, {"x": (4,)}, {"x": "float32"}, n_threads=1)
        np.testing.assert_array_equal(model(inputs[0]), 2.0)


def test_tuples_within_tuples_become_one(case, tmp_path):
    def build(emit, x):
        more = emit(relax.op.add(x, relax.const(1.0, "float32")))
        double = emit(relax.op.multiply(x, relax.const(2.0, "float32")))
        return relax.Tuple([more, relax.Tuple([x, double])])

    network = network_of_relax("nested", module_of({"x": (4,)}, build), {})
    assert [each.shape for each in interface_of(network).outputs] == 3 * [(4,)]
    path = str(tmp_path / "network.so")
    export(compile_network(prepare(network, case.target), None, case.target), path)
    x = np.arange(4, dtype=np.float32)
    model = CompiledModel(path, network.input_shapes, network.input_dtypes, n_threads=1)
    for found in (run_exported(path, [x]), model(x)):
        for one, expected in zip(found, [x + 1, x, 2 * x], strict=True):
            np.testing.assert_array_equal(one, expected)


def test_an_exported_network_runs_in_another_process(case, tmp_path):
    path = str(tmp_path / "network.so")
    export(case.tuned["prepack"], path)
    pool = WorkerPool(1, modules=("tvm_adaptive.runner.measure",))
    try:
        (outcome,) = pool.map(run_exported, [(path, case.inputs)], timeout_sec=120)
        assert outcome.error is None
        assert outputs_agree(outcome.value, case.reference)
    finally:
        pool.close()


def test_a_crash_there_is_an_error_here(case, library):
    def crash(path, inputs):
        run_exported(path, inputs)
        os.kill(os.getpid(), signal.SIGSEGV)

    pool = WorkerPool(1, modules=("tvm_adaptive.runner.measure",))
    try:
        (outcome,) = pool.map(crash, [(library, case.inputs)], timeout_sec=120)
    finally:
        pool.close()
    assert isinstance(outcome.error, WorkerDiedError)


def test_libraries_must_be_shared_ones(case, tmp_path):
    with pytest.raises(InvalidOptionError, match=r"path must end in .so or .tar but got"):
        export(case.tuned["NHWC"], tmp_path / "network.zip")
