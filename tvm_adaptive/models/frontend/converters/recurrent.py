"""LSTM, GRU and RNN, unrolled over their steps.

The products with the inputs of all steps are one matrix product; that with the state is one
for each step, the same function every time and therefore one task.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import relax
from tvm_adaptive._tvm.onnx_frontend import OnnxNode, as_text
from tvm_adaptive.models.frontend.converters import values
from tvm_adaptive.models.frontend.converters.values import Expr, constant, shape_of, split_evenly

Activation = Callable[[Expr], Expr]

# Each step is two functions; more steps would take minutes to translate and compile.
_MAX_STEPS = 1024
_DEFAULTS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_ALPHAS = {
    "affine": 1.0,
    "leakyrelu": 0.01,
    "thresholdedrelu": 1.0,
    "scaledtanh": 1.0,
    "hardsigmoid": 0.2,
    "elu": 1.0,
}
_BETAS = {"affine": 0.0, "scaledtanh": 1.0, "hardsigmoid": 0.5}


@dataclasses.dataclass(frozen=True)
class _Direction:
    """One direction of a layer: weights as the products need them, and its start."""

    node: OnnxNode
    dtype: str
    w: Expr  # inputs x gates
    r: Expr  # hidden x gates
    w_bias: Expr  # of all gates
    r_bias: Expr
    peephole: Expr | None
    hidden: Expr  # batch x hidden
    cell: Expr | None
    activations: Sequence[Activation]
    is_reversed: bool

    def limited(self, x: Expr) -> Expr:
        """Clip what goes into an activation."""
        if "clip" not in self.node.attributes:
            return x
        clip = float(self.node.attributes["clip"])
        low, high = (constant(sign * clip, self.dtype) for sign in (-1, 1))
        return relax.op.minimum(relax.op.maximum(x, low), high)

    def gates(self, x: Expr, n: int) -> list[Expr]:
        """Return the parts of all gates' values."""
        return split_evenly(self.node.builder, x, n, axis=-1)

    @functools.cached_property
    def r_by_gate(self) -> list[Expr]:
        """The weights of the state of each of a GRU's gates, split once for all steps."""
        return self.gates(self.r, 3)

    @functools.cached_property
    def r_bias_by_gate(self) -> list[Expr]:
        """The same of their biases."""
        return self.gates(self.r_bias, 3)

    def one_minus(self, x: Expr) -> Expr:
        """Return the share that a gate leaves."""
        return relax.op.subtract(constant(1, self.dtype), x)


def convert_recurrent(node: OnnxNode) -> Expr:
    """Convert an LSTM, a GRU or a plain recurrent layer."""
    op, emit = relax.op, node.builder.emit
    x, batch_first = node.inputs[0], node.number("layout")
    if batch_first:
        x = emit(op.permute_dims(x, [1, 0, 2]))
    n_steps, n_batch, _ = shape_of(x)
    if n_steps > _MAX_STEPS:
        raise ValueError(f"{n_steps} steps are more than {_MAX_STEPS}; use a shorter input")
    runs = [_run(direction, x) for direction in _directions(node, values.dtype_of(x), n_batch)]
    sequences, hiddens, cells = zip(*runs, strict=True)
    sequence = values.concatenated(node.builder, sequences, axis=1)
    finals = []
    for parts in [hiddens, cells] if node.operator == "LSTM" else [hiddens]:
        wide = [emit(op.expand_dims(each, [0])) for each in parts]
        finals.append(values.concatenated(node.builder, wide, axis=0))
    if batch_first:
        sequence = emit(op.permute_dims(sequence, [2, 0, 1, 3]))
        finals = [emit(op.permute_dims(each, [1, 0, 2])) for each in finals]
    return relax.Tuple([sequence, *finals])


def _directions(node: OnnxNode, dtype: str, n_batch: int) -> list[_Direction]:
    builder, inputs, n_gates = node.builder, node.inputs, _GATES[node.operator]
    n_inputs, n_hidden = shape_of(inputs[1])[-1], shape_of(inputs[2])[-1]
    name = node.text("direction", "forward")
    n_directions = 2 if name == "bidirectional" else 1
    activations = _activations(node, n_directions, dtype)

    def part(value: Expr | None, place: int, shape: Sequence[int], axis: int = 0) -> Expr:
        """Return one direction of an input; zeros where it is left out."""
        if value is None:
            return constant(np.zeros(shape), dtype)
        if n_directions > 1:
            known = values.array_of(value)
            if known is not None:
                return constant(np.take(known, place, axis).reshape(shape), dtype)
            value = split_evenly(builder, value, n_directions, axis)[place]
        return builder.emit(relax.op.reshape(value, list(shape)))

    # The state's directions are in the middle where the batch comes first.
    axis = 1 if node.number("layout") else 0
    is_lstm = node.operator == "LSTM"
    found = []
    for place in range(n_directions):
        bias = part(inputs[3], place, [2 * n_gates * n_hidden])
        w_bias, r_bias = split_evenly(builder, bias, 2, axis=0)
        has_peephole = is_lstm and inputs[7] is not None
        found.append(
            _Direction(
                node,
                dtype,
                values.transposed(builder, part(inputs[1], place, [n_gates * n_hidden, n_inputs])),
                values.transposed(builder, part(inputs[2], place, [n_gates * n_hidden, n_hidden])),
                w_bias,
                r_bias,
                peephole=part(inputs[7], place, [3 * n_hidden]) if has_peephole else None,
                hidden=part(inputs[5], place, [n_batch, n_hidden], axis),
                cell=part(inputs[6], place, [n_batch, n_hidden], axis) if is_lstm else None,
                activations=activations[place],
                is_reversed=name == "reverse" or place == 1,
            )
        )
    return found


def _run(direction: _Direction, x: Expr) -> tuple[Expr, Expr, Any]:
    """Return the states of all steps, the last state and the last cell."""
    node = direction.node
    op, builder, step = relax.op, node.builder, _STEPS[node.operator]
    n_steps, n_batch, n_inputs = shape_of(x)
    rows = builder.emit(op.reshape(x, [n_steps * n_batch, n_inputs]))
    product = builder.emit(op.matmul(rows, direction.w))
    product = builder.emit(op.add(product, direction.w_bias))
    parts = split_evenly(builder, product, n_steps, axis=0)
    hidden, cell = direction.hidden, direction.cell
    n_hidden = shape_of(hidden)[1]
    zero = constant(np.zeros((n_batch, n_hidden)), direction.dtype)
    states: list[Expr] = [None] * n_steps
    for place in reversed(range(n_steps)) if direction.is_reversed else range(n_steps):
        mask = _mask(builder, node.inputs[4], place, n_batch)
        new_hidden, new_cell = step(direction, parts[place], hidden, cell)
        if mask is None:
            hidden, cell, states[place] = new_hidden, new_cell, new_hidden
            continue
        # A sequence that has ended keeps its state and puts out zeros.
        states[place] = builder.emit(op.where(mask, new_hidden, zero))
        hidden = builder.emit(op.where(mask, new_hidden, hidden))
        if new_cell is not None:
            cell = builder.emit(op.where(mask, new_cell, cell))
    joined = values.concatenated(builder, states, axis=0)
    return builder.emit(op.reshape(joined, [n_steps, 1, n_batch, n_hidden])), hidden, cell


def _mask(builder: Any, lengths: Expr | None, place: int, n_batch: int) -> Expr | None:
    """Return which sequences have this step; None for all."""
    if lengths is None:
        return None
    known = values.array_of(lengths)
    if known is not None:
        valid = known.reshape(n_batch, 1) > place
        return None if valid.all() else constant(valid, "bool")
    length = builder.emit(relax.op.reshape(lengths, [n_batch, 1]))
    return builder.emit(relax.op.greater(length, constant(place, values.dtype_of(lengths))))


def _lstm_step(of: _Direction, x: Expr, hidden: Expr, cell: Any) -> tuple[Expr, Any]:
    op, emit = relax.op, of.node.builder.emit
    f, g, h = of.activations
    total = emit(op.add(op.add(op.matmul(hidden, of.r), x), of.r_bias))
    input_gate, output_gate, forget_gate, candidate = of.gates(total, 4)
    peephole = None if of.peephole is None else of.gates(of.peephole, 3)
    if peephole is not None:
        input_gate = op.add(input_gate, op.multiply(peephole[0], cell))
        forget_gate = op.add(forget_gate, op.multiply(peephole[2], cell))
    input_gate = f(of.limited(input_gate))
    is_coupled = of.node.number("input_forget")
    forget_gate = of.one_minus(input_gate) if is_coupled else f(of.limited(forget_gate))
    candidate = g(of.limited(candidate))
    new_cell = emit(op.add(op.multiply(forget_gate, cell), op.multiply(input_gate, candidate)))
    if peephole is not None:
        output_gate = op.add(output_gate, op.multiply(peephole[1], new_cell))
    output_gate = f(of.limited(output_gate))
    return emit(op.multiply(output_gate, h(new_cell))), new_cell


def _gru_step(of: _Direction, x: Expr, hidden: Expr, _cell: Any) -> tuple[Expr, Any]:
    op, emit = relax.op, of.node.builder.emit
    f, g = of.activations
    resets_after = of.node.number("linear_before_reset")
    update_x, reset_x, candidate_x = of.gates(x, 3)
    if resets_after:
        product = emit(op.add(op.matmul(hidden, of.r), of.r_bias))
        update_h, reset_h, candidate_h = of.gates(product, 3)
    else:
        weights, bias = of.r_by_gate, of.r_bias_by_gate
        update_h = op.add(op.matmul(hidden, weights[0]), bias[0])
        reset_h = op.add(op.matmul(hidden, weights[1]), bias[1])
    update = emit(f(of.limited(op.add(update_h, update_x))))
    reset = emit(f(of.limited(op.add(reset_h, reset_x))))
    if resets_after:
        candidate_h = op.multiply(reset, candidate_h)
    else:
        product = op.matmul(emit(op.multiply(reset, hidden)), weights[2])
        candidate_h = op.add(product, bias[2])
    candidate = emit(g(of.limited(op.add(candidate_h, candidate_x))))
    new = op.multiply(of.one_minus(update), candidate)
    return emit(op.add(new, op.multiply(update, hidden))), None


def _rnn_step(of: _Direction, x: Expr, hidden: Expr, _cell: Any) -> tuple[Expr, Any]:
    op = relax.op
    (f,) = of.activations
    total = op.add(op.add(op.matmul(hidden, of.r), x), of.r_bias)
    return of.node.builder.emit(f(of.limited(total))), None


# From a direction, the input's part, the state and the cell to the next two.
_STEPS = {"LSTM": _lstm_step, "GRU": _gru_step, "RNN": _rnn_step}


def _activations(node: OnnxNode, n_directions: int, dtype: str) -> list[list[Activation]]:
    """Return the activations of each direction."""
    defaults = _DEFAULTS[node.operator]
    names = [as_text(each) for each in node.attributes.get("activations", ())]
    alphas = list(node.attributes.get("activation_alpha", ()))
    betas = list(node.attributes.get("activation_beta", ()))
    found = []
    for given in names or defaults * n_directions:
        name = given.lower()  # ONNX Runtime takes them in small and capital letters
        # A list names values for those functions alone that take one, in their order.
        alpha = alphas.pop(0) if name in _ALPHAS and alphas else _ALPHAS.get(name, 0.0)
        beta = betas.pop(0) if name in _BETAS and betas else _BETAS.get(name, 0.0)
        found.append(_activation(given, float(alpha), float(beta), dtype))
    n = len(defaults)
    return [found[place * n : (place + 1) * n] for place in range(n_directions)]


def _activation(name: str, alpha: float, beta: float, dtype: str) -> Activation:
    op = relax.op
    a, b, zero, one = (constant(value, dtype) for value in (alpha, beta, 0.0, 1.0))

    def elu(x: Expr) -> Expr:
        return op.where(op.greater(x, zero), x, op.multiply(op.subtract(op.exp(x), one), a))

    functions: dict[str, Activation] = {
        "relu": op.nn.relu,
        "tanh": op.tanh,
        "sigmoid": op.sigmoid,
        "affine": lambda x: op.add(op.multiply(x, a), b),
        "leakyrelu": lambda x: op.nn.leakyrelu(x, alpha),
        "thresholdedrelu": lambda x: op.where(op.greater(x, a), x, op.multiply(x, zero)),
        "scaledtanh": lambda x: op.multiply(op.tanh(op.multiply(x, b)), a),
        "hardsigmoid": lambda x: op.clip(op.add(op.multiply(x, a), b), 0.0, 1.0),
        "elu": elu,
        "softsign": lambda x: op.divide(x, op.add(op.abs(x), one)),
        "softplus": op.nn.softplus,
    }
    if name.lower() not in functions:
        raise ValueError(f"the activation {name} is unknown")
    return functions[name.lower()]
