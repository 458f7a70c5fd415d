"""Small networks of Relax operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive._tvm import IRModule, relax
from tvm_adaptive.models import Network

Shapes = Mapping[str, tuple[Any, ...]]
# Makes the result of what emits a value, and of the inputs.
Build = Callable[..., Any]


def drawn(shape: tuple[int, ...], seed: int = 0, dtype: str = "float32") -> npt.NDArray[Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def module_of(shapes: Shapes, build: Build, dtype: str = "float32") -> IRModule:
    """Return a module of what is built, step by step, from inputs."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(name, relax.TensorType(shape, dtype)) for name, shape in shapes.items()]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(build(builder.emit, *inputs))
        builder.emit_func_output(result)
    return builder.get()


def network_of(shapes: Shapes, build: Build, dtype: str = "float32") -> Network:
    """Return a network of what is built, step by step, from inputs."""
    mod = module_of(shapes, build, dtype)
    return Network("net", mod, {}, dict(shapes), dict.fromkeys(shapes, dtype))
