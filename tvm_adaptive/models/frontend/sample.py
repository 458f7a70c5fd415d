"""Inputs that the user gives: arrays by names, in memory or in a file of ``numpy.savez``."""

from __future__ import annotations

import dataclasses
import os
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tvm_adaptive.errors import InvalidOptionError, as_invalid_option, summary_line
from tvm_adaptive.models.network import Network, shape_text
from tvm_adaptive.values.agreement import numpy_dtype

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
Sample: TypeAlias = "Arrays | str | os.PathLike[str]"


def read_sample(sample: Sample) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a sample; raise InvalidOptionError if it has none to read."""
    if isinstance(sample, Mapping):
        return {str(name): _array(str(name), value) for name, value in sample.items()}
    if not isinstance(sample, str | os.PathLike):
        raise InvalidOptionError(
            "inputs must map the names of inputs to arrays, or be a file of numpy.savez, but is "
            f"{type(sample).__name__}."
        )
    path = Path(sample)
    try:
        with open(path, "rb") as file:
            found = np.load(file, allow_pickle=False)
            if not isinstance(found, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array without a name")
            return {name: np.asarray(found[name]) for name in found.files}
    except OSError as error:
        raise InvalidOptionError(
            f"The inputs {path} cannot be read: {error.strerror or summary_line(error)}."
        ) from error
    except Exception as error:  # of zip files, of numpy's format, of pickled objects
        raise InvalidOptionError(
            f"{path} is no file of numpy.savez, or a damaged one: {summary_line(error)}. Write "
            f"it with numpy.savez({path.name!r}, **arrays), with the names of the inputs."
        ) from error


def _array(name: str, value: Any) -> npt.NDArray[Any]:
    torch = sys.modules.get("torch")
    with as_invalid_option(f"Input {name} cannot be read"):
        if torch is not None and isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            if value.dtype == torch.bfloat16:  # which numpy does not know
                bits = value.contiguous().view(torch.int16).numpy()
                return np.asarray(bits.view(numpy_dtype("bfloat16")))
        return np.asarray(value)


def write_sample(arrays: Arrays, path: Path) -> None:
    """Write arrays to a file that :func:`read_sample` reads, whole or not at all."""
    fresh = path.with_name(f".{path.name}")
    # What numpy.savez does, which takes no array of the name "file".
    with zipfile.ZipFile(fresh, "w") as archive:
        for name, value in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(value), allow_pickle=False)
    os.replace(fresh, path)


def shapes_of_sample(
    arrays: Arrays, shapes: Mapping[str, Sequence[int]], source: str
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a sample; raise InvalidOptionError where others were given."""
    found = {name: tuple(value.shape) for name, value in arrays.items()}
    for name, shape in shapes.items():
        known = found.get(name or next(iter(found), ""))
        if known is not None and known != tuple(shape):
            raise InvalidOptionError(
                f"Input {name or 'shape'} was given the shape {shape_text(shape)}, but its array "
                f"in {source} has {shape_text(known)}; leave --input-shape out."
            )
    return {**{name: tuple(shape) for name, shape in shapes.items() if name}, **found}


def numbers_of(arrays: Arrays) -> dict[str, int]:
    """Return the integers and truth values of a sample that stand alone: rates, modes, flags."""
    return {
        name: int(value.reshape(-1)[0])
        for name, value in arrays.items()
        if value.size == 1 and value.dtype.kind in "iub"
    }


def with_sample(network: Network, arrays: Arrays, source: str) -> Network:
    """Return a network whose checks and timings use a sample."""
    wanted = network.input_shapes
    if missing := [name for name in wanted if name not in arrays]:
        kinds = [f"{n} ({network.input_dtypes[n]}, {shape_text(wanted[n])})" for n in missing]
        raise InvalidOptionError(
            f"{source} lacks inputs of {network.name}: {', '.join(kinds)}. Add an array for each."
        )
    if unknown := sorted(set(arrays) - set(wanted)):
        raise InvalidOptionError(
            f"{source} has {', '.join(unknown)}, but the inputs of {network.name} are "
            f"{', '.join(wanted) or 'none'}."
        )
    ordered = []
    for name, shape in wanted.items():
        found, dtype = arrays[name], network.input_dtypes[name]
        if dtype == "bfloat16" and found.dtype.str == "|V2":  # numpy.savez writes it so
            found = found.view(numpy_dtype(dtype))
        if tuple(found.shape) != shape:
            raise InvalidOptionError(
                f"{name} in {source} has the shape {shape_text(found.shape)}, but the input of "
                f"{network.name} has {shape_text(shape)}."
            )
        if str(found.dtype) != dtype:
            raise InvalidOptionError(
                f"{name} in {source} is of {found.dtype}, but the input of {network.name} is of "
                f"{dtype}; convert it with .astype({dtype!r})."
            )
        ordered.append(np.ascontiguousarray(found).reshape(shape))
    return dataclasses.replace(network, sample=tuple(ordered))
