from __future__ import annotations

import numpy as np
import pytest

from tvm_adaptive._tvm.onnx_frontend import OnnxNode
from tvm_adaptive.models.frontend.converters import recurrent

helper = pytest.importorskip("onnx").helper
N_STEPS, N_BATCH, N_IN, N_HIDDEN = 2, 2, 3, 4
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


X = {"x": drawn(N_STEPS, N_BATCH, N_IN)}
WEIGHTS = {
    f"{kind}{part}": drawn(1, *shape, seed=seed)
    for kind, n in GATES.items()
    for seed, (part, shape) in enumerate(
        {
            "w": (n * N_HIDDEN, N_IN),
            "r": (n * N_HIDDEN, N_HIDDEN),
            "b": (2 * n * N_HIDDEN,),
        }.items()
    )
}


def layer(kind, name, *more, direction="forward", **how):
    names = ["x", *(f"{kind}{part}" for part in "wrb"), *more]
    return helper.make_node(
        kind, names, [f"{name}_y", f"{name}_h"], hidden_size=N_HIDDEN, direction=direction, **how
    )


# By ONNX's definitions, with constants of a list for some of those that take any.
ACTIVATIONS = {
    "Relu": lambda x: np.maximum(x, 0),
    "Affine": lambda x: 0.5 * x + 0.125,
    "Tanh": np.tanh,
    "LeakyRelu": lambda x: np.where(x < 0, 0.25 * x, x),
    "ScaledTanh": lambda x: 1.5 * np.tanh(2 * x),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "ThresholdedRelu": lambda x: np.where(x > 1, x, 0),
    "HardSigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "Elu": lambda x: np.where(x < 0, np.exp(x) - 1, x),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Softplus": lambda x: np.log1p(np.exp(x)),
}
ALPHAS, BETAS = [0.5, 0.25, 1.5], [0.125, 2.0]


def test_activations_and_the_lists_of_their_constants(run_relax):
    given = {"activations": list(ACTIVATIONS), "activation_alpha": ALPHAS, "activation_beta": BETAS}
    node = OnnxNode("RNN", None, [], given, None, 22)
    functions = recurrent._activations(node, len(ACTIVATIONS), "float32")
    x = np.linspace(-3, 3, 25, dtype="float32")
    outputs = run_relax(lambda value: [function(value) for (function,) in functions], x)
    for found, (name, function) in zip(outputs, ACTIVATIONS.items(), strict=True):
        assert np.allclose(found, function(x), atol=1e-6), name


def test_lengths_and_states_that_come_in_with_the_data(compare):
    inputs = {
        "n": np.array([1, 2], "int32"),
        "h": drawn(1, N_BATCH, N_HIDDEN, seed=4),
        "c": drawn(1, N_BATCH, N_HIDDEN, seed=5),
    }
    compare([layer("LSTM", "back", "n", "h", "c", direction="reverse")], X | inputs, WEIGHTS)


def test_what_cannot_be_converted_says_why(refusal):
    assert "1025 steps are more than 1024; use a shorter input" in refusal(
        [layer("RNN", "long")], {"x": drawn(1025, 1, N_IN)}, WEIGHTS
    )
    assert "the activation Bend is unknown" in refusal(
        [layer("RNN", "odd", activations=["Bend"])], X, WEIGHTS
    )
