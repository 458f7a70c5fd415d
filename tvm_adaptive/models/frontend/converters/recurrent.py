"""LSTM, GRU and RNN, unrolled over their steps.

The products with the inputs of all steps are one matrix product; that with the state is one
for each step, the same function every time and therefore one task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import relax
from tvm_adaptive.models.frontend.converters.values import (
    array_of,
    concatenated,
    constant,
    dtype_of,
    shape_of,
    split_evenly,
    transposed,
)

Expr = Any
Activation = Callable[[Expr], Expr]

# Each step is two functions; more steps would take minutes to translate and compile.
_MAX_STEPS = 1024
_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_ALPHAS = {
    "Affine": 1.0,
    "LeakyRelu": 0.01,
    "ThresholdedRelu": 1.0,
    "ScaledTanh": 1.0,
    "HardSigmoid": 0.2,
    "Elu": 1.0,
}
_BETAS = {"Affine": 0.0, "ScaledTanh": 1.0, "HardSigmoid": 0.5}


@dataclasses.dataclass(frozen=True)
class _Direction:
    """The weights of one direction, as the products need them, and its start."""

    w: Expr  # inputs x gates
    r: Expr  # hidden x gates
    w_bias: Expr  # of all gates
    r_bias: Expr
    peephole: Expr | None
    hidden: Expr  # batch x hidden
    cell: Expr | None
    activations: Sequence[Activation]
    is_reversed: bool


@dataclasses.dataclass(frozen=True)
class _Layer:
    """What the directions share."""

    builder: Any
    n_hidden: int
    dtype: str
    clip: float | None
    couples_gates: bool  # of an LSTM: the forget gate is one minus the input gate
    resets_after: bool  # of a GRU: linear_before_reset

    def limited(self, x: Expr) -> Expr:
        """Clip what goes into an activation."""
        if self.clip is None:
            return x
        low, high = (constant(sign * self.clip, self.dtype) for sign in (-1, 1))
        return relax.op.minimum(relax.op.maximum(x, low), high)

    def gates(self, x: Expr, n: int) -> list[Expr]:
        """Return the parts of all gates' values."""
        return split_evenly(self.builder, x, n, axis=-1)


def convert_lstm(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert an LSTM."""
    return _convert("LSTM", _lstm_step, builder, inputs, attributes)


def convert_gru(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert a GRU."""
    return _convert("GRU", _gru_step, builder, inputs, attributes)


def convert_rnn(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert a plain recurrent layer."""
    return _convert("RNN", _rnn_step, builder, inputs, attributes)


# From the layer, a direction, the input's part, the state and the cell to the next two.
_Step = Callable[[_Layer, _Direction, Expr, Expr, Any], tuple[Expr, Any]]


def _convert(kind: str, step: _Step, builder: Any, inputs: Any, attributes: dict[str, Any]) -> Expr:
    batch_first = bool(attributes.get("layout", 0))
    x, lengths = inputs[0], inputs[4]
    if batch_first:
        x = builder.emit(relax.op.permute_dims(x, [1, 0, 2]))
    n_steps, n_batch, _ = shape_of(x)
    if n_steps > _MAX_STEPS:
        raise ValueError(f"{n_steps} steps are more than {_MAX_STEPS}; use a shorter input")
    layer = _Layer(
        builder,
        shape_of(inputs[2])[-1],
        dtype_of(x),
        float(attributes["clip"]) if "clip" in attributes else None,
        bool(attributes.get("input_forget", 0)),
        bool(attributes.get("linear_before_reset", 0)),
    )
    outputs: list[Expr] = []
    hiddens: list[Expr] = []
    cells: list[Expr] = []
    for direction in _directions(kind, layer, inputs, attributes, n_batch):
        sequence, hidden, cell = _run(layer, direction, step, x, lengths)
        outputs.append(sequence)
        hiddens.append(hidden)
        cells.append(cell)
    op = relax.op
    sequence = builder.emit(concatenated(builder, outputs, axis=1))
    finals = [
        builder.emit(
            concatenated(builder, [builder.emit(op.expand_dims(each, [0])) for each in parts], 0)
        )
        for parts in ([hiddens, cells] if kind == "LSTM" else [hiddens])
    ]
    if batch_first:
        sequence = builder.emit(op.permute_dims(sequence, [2, 0, 1, 3]))
        finals = [builder.emit(op.permute_dims(each, [1, 0, 2])) for each in finals]
    return relax.Tuple([sequence, *finals])


def _directions(
    kind: str, layer: _Layer, inputs: Any, attributes: dict[str, Any], n_batch: int
) -> list[_Direction]:
    builder, n_hidden = layer.builder, layer.n_hidden
    name = _text(attributes.get("direction", b"forward"))
    n_directions = 2 if name == "bidirectional" else 1
    activations = _activations(kind, attributes, n_directions, layer.dtype)
    n_gates = _GATES[kind]

    def part(value: Expr | None, place: int, shape: Sequence[int], axis: int = 0) -> Expr:
        """Return one direction of an input; zeros where it is left out."""
        if value is None:
            return constant(np.zeros(shape), layer.dtype)
        if n_directions > 1:
            known = array_of(value)
            if known is not None:
                return constant(np.take(known, place, axis).reshape(shape), layer.dtype)
            value = split_evenly(builder, value, n_directions, axis)[place]
        return builder.emit(relax.op.reshape(value, list(shape)))

    # The state's directions are in the middle where the batch comes first.
    axis = 1 if attributes.get("layout", 0) else 0
    found = []
    for place in range(n_directions):
        bias = part(inputs[3], place, [2 * n_gates * n_hidden])
        w_bias, r_bias = split_evenly(builder, bias, 2, axis=0)
        n_inputs = shape_of(inputs[1])[-1]
        has_peephole = kind == "LSTM" and inputs[7] is not None
        found.append(
            _Direction(
                w=transposed(builder, part(inputs[1], place, [n_gates * n_hidden, n_inputs])),
                r=transposed(builder, part(inputs[2], place, [n_gates * n_hidden, n_hidden])),
                w_bias=w_bias,
                r_bias=r_bias,
                peephole=part(inputs[7], place, [3 * n_hidden]) if has_peephole else None,
                hidden=part(inputs[5], place, [n_batch, n_hidden], axis),
                cell=part(inputs[6], place, [n_batch, n_hidden], axis) if kind == "LSTM" else None,
                activations=activations[place],
                is_reversed=name == "reverse" or place == 1,
            )
        )
    return found


def _run(
    layer: _Layer, direction: _Direction, step: _Step, x: Expr, lengths: Expr | None
) -> tuple[Expr, Expr, Any]:
    """Return the states of all steps, the last state and the last cell."""
    op, builder = relax.op, layer.builder
    n_steps, n_batch, n_inputs = shape_of(x)
    rows = builder.emit(op.reshape(x, [n_steps * n_batch, n_inputs]))
    product = builder.emit(op.matmul(rows, direction.w))
    product = builder.emit(op.add(product, direction.w_bias))
    parts = split_evenly(builder, product, n_steps, axis=0)
    hidden, cell = direction.hidden, direction.cell
    zero = constant(np.zeros((n_batch, layer.n_hidden)), layer.dtype)
    states: list[Expr] = [None] * n_steps
    for place in reversed(range(n_steps)) if direction.is_reversed else range(n_steps):
        mask = _mask(builder, lengths, place, n_batch)
        new_hidden, new_cell = step(layer, direction, parts[place], hidden, cell)
        if mask is None:
            hidden, cell, states[place] = new_hidden, new_cell, new_hidden
            continue
        # A sequence that has ended keeps its state and puts out zeros.
        states[place] = builder.emit(op.where(mask, new_hidden, zero))
        hidden = builder.emit(op.where(mask, new_hidden, hidden))
        if new_cell is not None:
            cell = builder.emit(op.where(mask, new_cell, cell))
    joined = builder.emit(concatenated(builder, states, axis=0))
    shape = [n_steps, 1, n_batch, layer.n_hidden]
    return builder.emit(op.reshape(joined, shape)), hidden, cell


def _mask(builder: Any, lengths: Expr | None, place: int, n_batch: int) -> Expr | None:
    """Return which sequences have this step; None for all."""
    if lengths is None:
        return None
    known = array_of(lengths)
    if known is not None:
        valid = known.reshape(n_batch, 1) > place
        return None if valid.all() else constant(valid, "bool")
    length = builder.emit(relax.op.reshape(lengths, [n_batch, 1]))
    return builder.emit(relax.op.greater(length, constant(place, dtype_of(lengths))))


def _lstm_step(layer: _Layer, of: _Direction, x: Expr, hidden: Expr, cell: Any) -> tuple[Expr, Any]:
    op, builder = relax.op, layer.builder
    f, g, h = of.activations
    total = builder.emit(op.add(op.add(op.matmul(hidden, of.r), x), of.r_bias))
    input_gate, output_gate, forget_gate, candidate = layer.gates(total, 4)
    peephole = None if of.peephole is None else layer.gates(of.peephole, 3)
    if peephole is not None:
        input_gate = op.add(input_gate, op.multiply(peephole[0], cell))
        forget_gate = op.add(forget_gate, op.multiply(peephole[2], cell))
    input_gate = f(layer.limited(input_gate))
    if layer.couples_gates:
        forget_gate = op.subtract(constant(1, layer.dtype), input_gate)
    else:
        forget_gate = f(layer.limited(forget_gate))
    candidate = g(layer.limited(candidate))
    new_cell = op.add(op.multiply(forget_gate, cell), op.multiply(input_gate, candidate))
    new_cell = builder.emit(new_cell)
    if peephole is not None:
        output_gate = op.add(output_gate, op.multiply(peephole[1], new_cell))
    output_gate = f(layer.limited(output_gate))
    return builder.emit(op.multiply(output_gate, h(new_cell))), new_cell


def _gru_step(layer: _Layer, of: _Direction, x: Expr, hidden: Expr, _cell: Any) -> tuple[Expr, Any]:
    op, builder = relax.op, layer.builder
    f, g = of.activations
    update_x, reset_x, candidate_x = layer.gates(x, 3)
    bias = layer.gates(of.r_bias, 3)
    if layer.resets_after:
        product = builder.emit(op.add(op.matmul(hidden, of.r), of.r_bias))
        update_h, reset_h, candidate_h = layer.gates(product, 3)
    else:
        weights = layer.gates(of.r, 3)
        update_h = op.add(op.matmul(hidden, weights[0]), bias[0])
        reset_h = op.add(op.matmul(hidden, weights[1]), bias[1])
    update = builder.emit(f(layer.limited(op.add(update_h, update_x))))
    reset = builder.emit(f(layer.limited(op.add(reset_h, reset_x))))
    if layer.resets_after:
        candidate_h = op.multiply(reset, candidate_h)
    else:
        product = op.matmul(builder.emit(op.multiply(reset, hidden)), weights[2])
        candidate_h = op.add(product, bias[2])
    candidate = builder.emit(g(layer.limited(op.add(candidate_h, candidate_x))))
    kept = op.multiply(update, hidden)
    new = op.multiply(op.subtract(constant(1, layer.dtype), update), candidate)
    return builder.emit(op.add(new, kept)), None


def _rnn_step(layer: _Layer, of: _Direction, x: Expr, hidden: Expr, _cell: Any) -> tuple[Expr, Any]:
    op = relax.op
    (f,) = of.activations
    total = op.add(op.add(op.matmul(hidden, of.r), x), of.r_bias)
    return layer.builder.emit(f(layer.limited(total))), None


def _activations(
    kind: str, attributes: dict[str, Any], n_directions: int, dtype: str
) -> list[list[Activation]]:
    """Return the activations of each direction."""
    names = [_text(each) for each in attributes.get("activations", ())]
    names = names or list(_DEFAULTS[kind]) * n_directions
    alphas = list(attributes.get("activation_alpha", ()))
    betas = list(attributes.get("activation_beta", ()))
    found = []
    for name in names:
        # A list names values for those functions alone that take one, in their order.
        alpha = alphas.pop(0) if name in _ALPHAS and alphas else _ALPHAS.get(name, 0.0)
        beta = betas.pop(0) if name in _BETAS and betas else _BETAS.get(name, 0.0)
        found.append(_activation(name, float(alpha), float(beta), dtype))
    n = len(_DEFAULTS[kind])
    return [found[place * n : (place + 1) * n] for place in range(n_directions)]


def _activation(name: str, alpha: float, beta: float, dtype: str) -> Activation:
    op = relax.op
    a, b, zero, one = (constant(value, dtype) for value in (alpha, beta, 0.0, 1.0))

    functions: dict[str, Activation] = {
        "Relu": op.nn.relu,
        "Tanh": op.tanh,
        "Sigmoid": op.sigmoid,
        "Affine": lambda x: op.add(op.multiply(x, a), b),
        "LeakyRelu": lambda x: op.nn.leakyrelu(x, alpha),
        "ThresholdedRelu": lambda x: op.where(op.greater(x, a), x, op.multiply(x, zero)),
        "ScaledTanh": lambda x: op.multiply(op.tanh(op.multiply(x, b)), a),
        "HardSigmoid": lambda x: op.clip(op.add(op.multiply(x, a), b), 0.0, 1.0),
        "Elu": lambda x: op.where(
            op.greater(x, zero),
            x,
            op.multiply(op.subtract(op.exp(x), one), a),
        ),
        "Softsign": lambda x: op.divide(x, op.add(op.abs(x), one)),
        "Softplus": op.nn.softplus,
    }
    if name not in functions:
        raise ValueError(f"the activation {name} is unknown")
    return functions[name]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
