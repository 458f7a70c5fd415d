"""Compiled networks as functions: which arrays are shared with the caller, and which are copied."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_adaptive
from tests.models.networks import drawn, network_of
from tvm_adaptive._tvm import relax, start_thread_pool, tensor
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import Network, compile_network, export, inference, prepare
from tvm_adaptive.models.inference import CompiledModel
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.values.agreement import numpy_dtype

SHAPE = (3, 5)
WEIGHT = np.random.default_rng(0).standard_normal(SHAPE).astype("float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CompiledModel:
    """What returns its input, a sum, a constant and integers."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(SHAPE, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            weight = relax.const(WEIGHT)
            y = builder.emit(relax.op.add(x, weight))
            whole = builder.emit(relax.op.astype(y, "int32"))
            results = builder.emit_output(relax.Tuple([x, y, weight, whole]))
        builder.emit_func_output(results)
    path = tmp_path_factory.mktemp("shared") / "network.so"
    target = resolve_target("cpu")
    network = Network("shared", builder.get(), {}, {"x": SHAPE}, {"x": "float32"})
    export(compile_network(prepare(network, target, "keep"), None, target), path)
    return CompiledModel(path, {"x": SHAPE}, {"x": "float32"}, n_threads=2)


def test_only_memory_that_others_own_is_copied(
    model: CompiledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []
    copied = inference.tensor
    monkeypatch.setattr(inference, "tensor", lambda array: copies.append(array) or copied(array))
    memory = np.ones(64, np.float32)
    start = -memory.ctypes.data % 64 // 4  # where kernels load vectors
    x = memory[start : start + 15].reshape(SHAPE)
    given, total, constant, whole = model(x)
    assert [each.shape for each in copies] == [SHAPE, SHAPE]  # the input and the constant
    np.testing.assert_array_equal(given, x)
    np.testing.assert_array_equal(constant, WEIGHT)
    np.testing.assert_allclose(total, x + WEIGHT, rtol=1e-6)
    assert whole.dtype == np.int32
    x[...] = 7
    assert given.max() == 1
    assert not np.shares_memory(total, model(x)[1])


def test_a_process_that_was_forked_is_told_so(model: CompiledModel) -> None:
    model(np.zeros(SHAPE, np.float32))  # this thread has a pool
    said = errors_in_a_fork(
        lambda: model(np.zeros(SHAPE, np.float32)),
        lambda: CompiledModel(model.library, {"x": SHAPE}, {"x": "float32"}, n_threads=2),
        lambda: tvm_adaptive.compile("no such model"),  # before it reads or tunes anything
    )
    first, *others = said.splitlines()
    assert first.startswith("InvalidOptionError: The model was made in another process")
    assert len(others) == 2
    for each in others:
        assert each.startswith("InvalidOptionError: This process was forked from one that has run")


def errors_in_a_fork(*functions: Callable[[], object]) -> str:
    """Return a line for each function that raises in a forked process."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        for function in functions:
            try:
                function()
            except BaseException as error:
                os.write(writes, f"{type(error).__name__}: {error}\n".encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


def test_lists_of_what_a_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    expected = ("n", (2,), "int32")
    np.testing.assert_array_equal(inference._as_tensor([1, 2], *expected).numpy(), [1, 2])
    with pytest.raises(InvalidOptionError, match="n is int32, which cannot hold its numbers"):
        inference._as_tensor([1.7, 2.2], *expected)
    for numbers in ([1, 300], ["one", 2], [1, [2]]):
        with pytest.raises(InvalidOptionError, match="n is int8, which cannot hold its numbers"):
            inference._as_tensor(numbers, "n", (2,), "int8")


def test_a_pool_has_at_least_one_thread(model: CompiledModel) -> None:
    with pytest.raises(InvalidOptionError, match="n_threads must be at least 1 but got 0"):
        CompiledModel(model.library, {"x": SHAPE}, {"x": "float32"}, n_threads=0)


def test_each_model_runs_with_its_own_number_of_threads(model: CompiledModel) -> None:
    x = np.zeros(SHAPE, np.float32)

    def run_in_turns() -> list[int]:
        """Return how many threads a new thread uses after each model."""
        model(x)
        single = CompiledModel(model.library, {"x": SHAPE}, {"x": "float32"}, n_threads=1)
        sizes = [start_thread_pool()]
        for each in (model, single, single, model):
            each(x)
            sizes.append(start_thread_pool())
        return sizes

    with ThreadPoolExecutor(1) as executor:
        n_threads = min(2, len(os.sched_getaffinity(0)))
        assert executor.submit(run_in_turns).result() == [1, n_threads, 1, 1, n_threads]


def test_a_pool_that_stays_smaller_is_told_of_once(
    model: CompiledModel, caplog: pytest.LogCaptureFixture
) -> None:
    x = np.zeros(SHAPE, np.float32)

    def run_in_turns() -> None:
        single = CompiledModel(model.library, {"x": SHAPE}, {"x": "float32"}, n_threads=1)
        for each in (model, single, model):
            each(x)

    with ThreadPoolExecutor(1) as executor:
        executor.submit(run_in_turns).result()
    (warning,) = caplog.messages
    assert "with 1 threads instead of 2" in warning


@pytest.mark.parametrize("offset", [0, 1, 5])
def test_the_place_of_an_array_does_not_matter(model: CompiledModel, offset: int) -> None:
    memory = np.arange(64, dtype=np.float32)
    x = memory[offset : offset + 15].reshape(SHAPE)
    np.testing.assert_array_equal(model(x)[0], x)
    x.flags.writeable = False
    np.testing.assert_array_equal(model(x)[0], x)
    np.testing.assert_array_equal(model(np.asfortranarray(x))[0], x)
    np.testing.assert_array_equal(model(x.tolist())[0], x)


def test_numbers_and_examples(tmp_path: Path) -> None:
    """An example spares a network what it cannot divide by."""
    builder = relax.BlockBuilder()
    x, n = (
        relax.Var("x", relax.TensorType((), "float32")),
        relax.Var("n", relax.TensorType((), "int32")),
    )
    with builder.function("main", [x, n]):
        with builder.dataflow():
            share = builder.emit(relax.op.divide(relax.const(12, "int32"), n))
            result = builder.emit_output(relax.op.multiply(x, relax.op.astype(share, "float32")))
        builder.emit_func_output(result)
    target, path = resolve_target("cpu"), tmp_path / "network.so"
    shapes, types = {"x": (), "n": ()}, {"x": "float32", "n": "int32"}
    network = Network("shares", builder.get(), {}, shapes, types)
    export(compile_network(prepare(network, target, "keep"), None, target), path)
    example = [np.float32(1.0), np.int32(3)]
    model = CompiledModel(path, shapes, types, n_threads=2, example=example)
    for x_value, n_value in ((np.float32(2.0), np.int32(4)), (np.asarray(2.0, "float32"), 4)):
        found = model(x_value, n_value)
        assert isinstance(found, np.ndarray)
        assert found == 6.0
        assert found.flags.writeable


def test_arrays_of_brain_floats_come_and_go(tmp_path: Path) -> None:
    dtype = numpy_dtype("bfloat16")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(SHAPE, "bfloat16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.add(x, x))
        builder.emit_func_output(result)
    target, path = resolve_target("cpu"), tmp_path / "network.so"
    network = Network("doubled", builder.get(), {}, {"x": SHAPE}, {"x": "bfloat16"})
    export(compile_network(prepare(network, target, "keep"), None, target), path)
    model = CompiledModel(path, {"x": SHAPE}, {"x": "bfloat16"}, n_threads=2)
    array = WEIGHT.astype(dtype)
    found = model(array)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype("float32"), 2 * array.astype("float32"))
    again = model(tensor(found))  # as another model returns it that was called with such
    np.testing.assert_array_equal(again.numpy().astype("float32"), 4 * array.astype("float32"))


def test_a_dropped_model_is_unloaded_and_its_outputs_stay(tmp_path: Path) -> None:
    path, x = tmp_path / "network.so", drawn((1024, 1024), seed=1)
    weight = drawn(x.shape)  # 4 MB
    network = network_of({"x": x.shape}, lambda _emit, x: relax.op.add(x, relax.const(weight)))
    target = resolve_target("cpu")
    export(compile_network(prepare(network, target, "keep"), None, target), path)
    for _ in range(3):
        one, other = (
            CompiledModel(path, network.input_shapes, network.input_dtypes, n_threads=2)
            for _ in range(2)
        )
        outputs = [one(x), other(x)]
        del one
        outputs.append(other(x))
        assert is_mapped(path)
        del other
        gc.collect()
        assert not is_mapped(path)
        for output in outputs:
            np.testing.assert_allclose(output, x + weight, rtol=1e-6)


def is_mapped(path: Path) -> bool:
    """Say whether this process has a file, removed or not, in its memory."""
    return os.path.realpath(path) in Path("/proc/self/maps").read_text()


class Other:
    """An array of another library, whose types have names of their own."""

    def __init__(self, array: np.ndarray, kind: int = 1) -> None:
        self.array, self.kind = array, kind

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0


class Named(Other):
    shape, dtype = SHAPE, "<dtype: 'float32'>"


class Table:
    """What only numpy can read, as a data frame or a dataset in a file."""

    def __init__(self, array: np.ndarray) -> None:
        self.shape, self.array = array.shape, array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.array, dtype)


def test_what_numpy_can_read_is_read(model: CompiledModel) -> None:
    x = np.random.default_rng(1).standard_normal(SHAPE).astype("float32")
    for one, expected in zip(model(Table(x)), model(x), strict=True):
        assert isinstance(one, np.ndarray)
        np.testing.assert_array_equal(one, expected)
    with pytest.raises(InvalidOptionError, match=r"must be float32 of shape"):
        model(Table(x[..., :-1]))


@pytest.mark.parametrize("other", [Other, Named])
def test_arrays_of_other_libraries_are_known_by_what_they_hold(
    model: CompiledModel, other: type[Other]
) -> None:
    x = np.random.default_rng(1).standard_normal(SHAPE).astype("float32")
    for one, expected in zip(model(other(x)), model(x), strict=True):
        np.testing.assert_array_equal(np.from_dlpack(one), expected)
    with pytest.raises(InvalidOptionError, match=r"must be float32 of shape .* but is float64"):
        model(other(x.astype("float64")))
    with pytest.raises(InvalidOptionError, match="Input x must be on the CPU"):
        model(other(x, kind=2))
