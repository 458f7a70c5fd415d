"""Frameworks that run a user's model beside the tuned library, each in a worker of its own.

``open_peer`` and ``time_peer`` run in that worker.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.frontend import reader
from tvm_adaptive.models.frontend.onnx_file import open_session
from tvm_adaptive.models.frontend.reader import Array, Inference, Opener
from tvm_adaptive.models.frontend.torch_program import load_program, open_compiled, open_program
from tvm_adaptive.models.run import NETWORK_REPEAT_MS
from tvm_adaptive.workers.scratch import ScratchFolder

# The share of a turn that warms up caches and threads.
_WARM_UP_SHARE = 0.2


@dataclasses.dataclass(frozen=True)
class Peer:
    """A framework that runs models on this machine's CPU."""

    title: str
    package: str  # Python's name for it, and pip's
    open: Mapping[str, Opener]  # by the ending of the model's file

    @property
    def framework(self) -> str:
        """Name and version."""
        return reader.framework_version(self.title, self.package)


def open_exported(path: Path, inputs: Sequence[Array], n_threads: int | None) -> Inference:
    """Open a PyTorch program in ONNX Runtime, by PyTorch's own export."""
    import torch

    with ScratchFolder("onnx") as folder:
        exported = folder / "model.onnx"
        torch.onnx.export(load_program(path), f=exported, dynamo=True, verbose=False)
        return open_session(exported, inputs, n_threads)


def open_openvino(path: Path, inputs: Sequence[Array], n_threads: int | None) -> Inference:
    """Open a file in OpenVINO: lowest latency, float32, fixed shapes, subnormals as zeros."""
    import openvino

    request = compile_openvino(path, inputs, n_threads).create_infer_request()
    for place, value in enumerate(inputs):
        request.set_input_tensor(place, openvino.Tensor(np.asarray(value, order="C")))
    return Inference(
        lambda: request.infer(share_outputs=True),
        lambda found: [np.array(each) for each in found.to_tuple()],
    )


def compile_openvino(
    path: Path, inputs: Sequence[Array], n_threads: int | None, **settings: str
) -> Any:
    """Compile a file in OpenVINO, with further settings."""
    import openvino

    core = openvino.Core()
    is_program = path.suffix == ".pt2"
    model = openvino.convert_model(load_program(path)) if is_program else core.read_model(str(path))
    model.reshape({place: list(value.shape) for place, value in enumerate(inputs)})
    config = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        # Subnormal numbers as zeros: PP-OCRv5's detector takes 26 instead of 43 ms.
        "CPU_DENORMALS_OPTIMIZATION": "YES",
        **settings,
    }
    if n_threads is not None:
        config["INFERENCE_NUM_THREADS"] = str(n_threads)
    return core.compile_model(model, "CPU", config)


PEERS: dict[str, Peer] = {
    "ort": Peer("ONNX Runtime", "onnxruntime", {".onnx": open_session, ".pt2": open_exported}),
    "openvino": Peer("OpenVINO", "openvino", {".onnx": open_openvino, ".pt2": open_openvino}),
    "torch": Peer("PyTorch", "torch", {".pt2": open_program}),
    "inductor": Peer("PyTorch Inductor", "torch", {".pt2": open_compiled}),
}


def peer_names(text: str) -> list[str]:
    """Return the names in ``"ort,openvino"``; raise InvalidOptionError for an unknown one."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in PEERS]:
        raise InvalidOptionError(
            f"Unknown peer {', '.join(map(repr, unknown))}; possible are {', '.join(PEERS)}."
        )
    return names


def check_installed(names: Sequence[str]) -> None:
    """Raise InvalidOptionError if the package of a peer is missing."""
    packages = dict.fromkeys(PEERS[name].package for name in names)
    if missing := [each for each in packages if importlib.util.find_spec(each) is None]:
        raise InvalidOptionError(
            f"The peers need packages that are not installed: pip install {' '.join(missing)}."
        )


class _Opened:
    inference: ClassVar[Inference | None] = None


def open_peer(
    name: str, path: Path, inputs: Sequence[Array], n_threads: int, memory_bytes: int | None
) -> list[Array]:
    """Open a model file in a framework, for ``time_peer``; return the outputs."""
    if memory_bytes is not None:
        reader.limit_memory(memory_bytes)
    inference = PEERS[name].open[path.suffix](path, inputs, n_threads)
    _Opened.inference = inference
    return inference.outputs(inference.run())


def time_peer(seconds: float) -> float:
    """Return the median seconds per inference of repeats, as long as the tuned library's."""
    assert _Opened.inference is not None, "open_peer comes first"
    run = _Opened.inference.run
    # A slow inference is warm after its first run.
    for _ in _repeat_secs(run, 0.0, _WARM_UP_SHARE * seconds):
        pass
    return statistics.median(_repeat_secs(run, NETWORK_REPEAT_MS / 1e3, seconds))


def _repeat_secs(run: Callable[[], Any], repeat_sec: float, seconds: float) -> Iterator[float]:
    """Yield the seconds per inference of each repeat."""
    end_sec = time.perf_counter() + seconds
    is_over = False
    while not is_over:
        start_sec, n_runs, elapsed_sec = time.perf_counter(), 0, 0.0
        while not n_runs or elapsed_sec < repeat_sec:
            run()
            n_runs += 1
            elapsed_sec = time.perf_counter() - start_sec
        yield elapsed_sec / n_runs
        is_over = time.perf_counter() >= end_sec
