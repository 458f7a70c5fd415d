from __future__ import annotations

import functools
import re

import numpy as np
import pytest
from scipy import special

from tvm_adaptive._tvm import relax, workload_key
from tvm_adaptive.models import Network, compile_network, prepare, run_network
from tvm_adaptive.tuning.target import resolve_target

# Relax operator, what it computes, and the range where it is not flat or infinite.
FUNCTIONS = {
    "exp": (np.exp, 80.0),
    "tanh": (np.tanh, 12.0),
    "erf": (special.erf, 6.0),
    "sigmoid": (special.expit, 40.0),
    "nn.silu": (lambda x: x * special.expit(x), 40.0),
    "nn.gelu": (lambda x: x * special.ndtr(x), 4.0),
    "nn.gelu_tanh": (
        lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        4.0,
    ),
    "nn.softmax": (special.softmax, 40.0),
}
# Relative. Half of a unit in the last place of float32 is 6e-8.
FUNCTION_ERROR = 4e-7
N = 5000  # what one build of a function computes
LIBRARY = re.compile(r"T\.(exp|tanh|erf|sigmoid)\(")


def operator(name: str):
    found = relax.op
    for part in name.split("."):
        found = getattr(found, part)
    return found


def network_of(name: str, n: int = 4096, dtype: str = "float32") -> Network:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((n,), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(builder.emit(operator(name)(x)))
        builder.emit_func_output(y)
    return Network("one", builder.get(), {}, {"x": (n,)}, {"x": dtype})


@functools.cache
def built(name: str, vector_math: bool | None):
    target = resolve_target("cpu")
    prepared = prepare(network_of(name, N), target, vector_math=vector_math)
    return compile_network(prepared, None, target)


def computed(name: str, values, *, vector_math: bool | None = None):
    """Compute a function of at most N values; the others add nothing to a softmax."""
    padded = np.full(N, -np.inf, "float32")
    padded[: len(values)] = values
    (result,) = run_network(built(name, vector_math), [padded])
    return result[: len(values)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_polynomials_are_nearly_as_exact_as_the_library(name):
    exact, limit = FUNCTIONS[name]
    x = np.concatenate([np.linspace(-limit, limit, 4000), np.geomspace(1e-6, limit, 1000)])
    x = x.astype("float32")
    expected = exact(x.astype(float))
    # Where a function is small because its parts cancel, its parts' errors count.
    scale = np.abs(expected) if name in ("exp", "nn.softmax") else np.maximum(np.abs(x), 1.0)

    def error(**how) -> float:
        return float(np.max(np.abs(computed(name, x, **how) - expected) / scale))

    # Sums and differences of floats, of which softmax is made, have errors of their own.
    assert 0 < error() <= error(vector_math=False) + FUNCTION_ERROR


@pytest.mark.parametrize("name", FUNCTIONS)
def test_cpus_call_no_library_and_gpus_and_those_who_ask_do(name):
    network = network_of(name)
    cpu, gpu = resolve_target("cpu"), resolve_target("nvidia/geforce-rtx-3090")
    assert not LIBRARY.search(str(prepare(network, cpu).mod))
    for kept in (prepare(network, cpu, vector_math=False), prepare(network, gpu)):
        assert LIBRARY.search(str(kept.mod))
    assert not LIBRARY.search(str(prepare(network, gpu, vector_math=True).mod))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types_stay_as_they_are(name, dtype):
    target = resolve_target("cpu")
    network = network_of(name, dtype=dtype)
    ways = [prepare(network, target, vector_math=each).mod for each in (True, False)]
    # Sums of halves are of float32.
    is_wide = (name, dtype) == ("nn.softmax", "float16")
    assert len({workload_key(mod) for mod in ways}) == 1 + is_wide


def test_what_is_masked_has_no_share():
    x = np.array([-np.inf, 0.0, -1e30, 0.0], "float32")
    assert computed("nn.softmax", x).tolist() == [0.0, 0.5, 0.0, 0.5]


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"erf"}))
def test_what_is_no_number_stays_none(name):
    assert np.isnan(computed(name, np.full(16, np.nan, "float32"))).all()


@pytest.mark.parametrize("name", ["exp", "tanh", "erf", "sigmoid"])
def test_limits(name):
    far = np.array([-np.inf, -1e30, 1e30, np.inf], "float32")
    low, high = {"exp": (0, np.inf), "sigmoid": (0, 1)}.get(name, (-1, 1))
    assert computed(name, far).tolist() == [low, low, high, high]
