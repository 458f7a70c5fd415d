"""From what a user writes to something to tune."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.importers.factory import is_factory, network_of_factory
from tvm_adaptive.importers.onnx_file import network_of_onnx
from tvm_adaptive.importers.relax_file import network_of_json
from tvm_adaptive.importers.torch_program import network_of_pt2
from tvm_adaptive.models import Network, TIRWorkload, load_workload

Shapes: TypeAlias = Mapping[str, Sequence[int]]

# To read another kind of file, write its importer in a file of its own and name it here.
FORMATS: dict[str, Callable[[Path, str, Shapes], Network]] = {
    ".onnx": network_of_onnx,
    ".pt2": network_of_pt2,
    ".json": network_of_json,
}


def load(what: str, input_shapes: Shapes | None = None) -> Network | TIRWorkload:
    """Return a network or an operator by its name, its file or its factory.

    Parameters
    ----------
    what : str
        A file whose name ends as one of :data:`FORMATS`; ``"package.module:factory"``,
        see :mod:`tvm_adaptive.importers.factory`; or a name that
        :func:`~tvm_adaptive.models.load_workload` knows.
    input_shapes : mapping of str to sequence of int, or None, default None
        Extents by the names of inputs, for those with dynamic shapes. Where there is one
        input only, ``""`` names it, too.

    Raises
    ------
    InvalidOptionError
        When there is no such model, its file is damaged, its framework is not installed,
        TVM cannot express it, or a shape stays dynamic; the message says what to do.
    """
    shapes = dict(input_shapes or {})
    path = Path(what)
    if path.suffix in FORMATS:
        _check_readable(path)
        return FORMATS[path.suffix](path, slug(path.stem), shapes)
    if is_factory(what):
        return network_of_factory(what, slug(what), shapes)
    if shapes:
        raise InvalidOptionError(f"The shapes of {what} are fixed; leave input shapes out.")
    try:
        return load_workload(what)
    except InvalidOptionError as error:
        raise InvalidOptionError(
            f"{error} A model of your own is a file that ends in {', '.join(FORMATS)}, or "
            "package.module:factory."
        ) from error


def slug(text: str) -> str:
    """Return a name for files: letters, digits, dots and dashes."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.") or "model"


def _check_readable(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise InvalidOptionError(f"The model {path} cannot be read: {reason}.") from error
