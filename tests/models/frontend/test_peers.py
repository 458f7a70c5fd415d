from __future__ import annotations

import numpy as np
import pytest

from tests.testing.conformance.test_file_format import GOOD
from tests.tuning.checks.shared import session_in
from tvm_adaptive._tvm import memory_database
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import outputs_agree, prepare
from tvm_adaptive.models.frontend import (
    FORMATS,
    PEERS,
    check_installed,
    load,
    open_peer,
    peer_names,
    peers,
    time_peer,
)
from tvm_adaptive.models.frontend.reader import Inference
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.checks.network import NetworkCheck

N_THREADS = 1


def test_names_come_from_a_list():
    assert peer_names("") == []
    assert peer_names("openvino, ort,openvino") == ["openvino", "ort"]
    with pytest.raises(InvalidOptionError, match="'tflite', 'x'; possible are ort, openvino, tor"):
        peer_names("ort,tflite,x")


def test_a_package_that_is_missing_is_named(monkeypatch):
    check_installed(["ort"])
    for name in ("ort", "torch"):
        missing = peers.Peer(name, f"no_such_{name}", {})
        monkeypatch.setitem(PEERS, name, missing)
    with pytest.raises(InvalidOptionError, match="pip install no_such_ort no_such_torch"):
        check_installed(["ort", "torch"])


def test_the_peer_of_a_format_opens_its_files():
    own = {ending: each.peer for ending, each in FORMATS.items() if each.peer}
    assert own == {".onnx": "ort", ".pt2": "torch"}
    assert all(ending in PEERS[name].open for ending, name in own.items())


def test_a_framework_that_is_no_peer_is_compared_with_and_not_timed(tmp_path, monkeypatch):
    monkeypatch.setitem(FORMATS, ".factor", GOOD)
    path = tmp_path / "net.factor"
    path.write_bytes(b"factor 2.5 end\n")
    network = load(str(path))
    with session_in(tmp_path / "run", Budget()) as session:
        prepared = prepare(network, session.target)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            comparison = check.measure_tuned(memory_database())
    assert not check._framework.has_rivals
    assert comparison is not None
    assert comparison.agree
    assert comparison.framework.startswith("NumPy")
    assert comparison.peers == ()
    assert 0.0 < comparison.before_sec < np.inf  # of the untuned network


@pytest.mark.parametrize("name", ["ort", "openvino"])
def test_frameworks_compute_an_onnx_file(name, onnx_file):
    pytest.importorskip(PEERS[name].package)
    path = onnx_file("encoder", batch="n")
    network = load(str(path), {"ids": (2, 16)})
    inputs = network.random_inputs()
    found = open_peer(name, path, inputs, N_THREADS, network.original.memory_bytes)
    assert outputs_agree(found, network.original.run(inputs))
    assert time_peer(0.0) > 0.0


def test_onnx_runtime_gets_our_number_of_threads(onnx_file, monkeypatch):
    runtime = pytest.importorskip("onnxruntime")
    made, session = [], runtime.InferenceSession

    def make(*arguments, **options):
        made.append(session(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(runtime, "InferenceSession", make)
    open_peer("ort", onnx_file("resnet"), [np.ones((1, 3, 32, 32), "float32")], 3, None)
    assert made[0].get_session_options().intra_op_num_threads == 3


def test_openvino_gets_our_threads_and_computes_in_float32(onnx_file, monkeypatch):
    openvino = pytest.importorskip("openvino")
    made = []

    class Core(openvino.Core):
        def compile_model(self, *arguments):
            made.append(super().compile_model(*arguments))
            return made[-1]

    monkeypatch.setattr(openvino, "Core", Core)
    open_peer("openvino", onnx_file("resnet"), [np.ones((1, 3, 32, 32), "float32")], 2, None)
    assert made[0].get_property("INFERENCE_NUM_THREADS") == 2
    assert made[0].get_property("INFERENCE_PRECISION_HINT") == openvino.Type.f32
    assert "LATENCY" in str(made[0].get_property("PERFORMANCE_HINT"))


@pytest.mark.parametrize("name", ["torch", "openvino", "ort"])
def test_frameworks_compute_a_program(name, torch, torch_models, tmp_path):
    pytest.importorskip("onnxscript" if name == "ort" else PEERS[name].package)
    from tvm_adaptive.models.frontend.torch_program import network_of_program

    model = torch_models["encoder"]
    program = torch.export.export(model.module.eval(), model.inputs)
    network = network_of_program(program, "net", {}, "net")
    inputs = network.random_inputs()
    n_before = torch.get_num_threads()
    try:
        path = network.original.file(tmp_path)
        found = open_peer(name, path, inputs, n_before + 1, None)
        assert torch.get_num_threads() == n_before + (name == "torch")
    finally:
        torch.set_num_threads(n_before)
    assert outputs_agree(found, network.original.run(inputs))


@pytest.mark.parametrize(
    ("run_sec", "n_runs"), [(1.0, 1 + 1), (1 / 8, 1 + 2), (1 / 128, 7 + 5 * 7)]
)
def test_a_turn_is_a_warm_up_and_repeats(monkeypatch, run_sec, n_runs):
    class Clock:
        now = 0.0
        n_calls = 0

        @classmethod
        def perf_counter(cls):
            return cls.now

    def run():
        Clock.now += run_sec
        Clock.n_calls += 1

    monkeypatch.setattr(peers, "time", Clock)
    monkeypatch.setattr(peers._Opened, "inference", Inference(run, lambda _: []))
    assert time_peer(0.25) == pytest.approx(run_sec)
    assert Clock.n_calls == n_runs
