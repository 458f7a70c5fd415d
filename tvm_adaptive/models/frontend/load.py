"""From what a user writes to something to tune."""

from __future__ import annotations

import re
from pathlib import Path

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import Network, TIRWorkload, load_workload
from tvm_adaptive.models.frontend.factory import is_factory, network_of_factory
from tvm_adaptive.models.frontend.onnx_file import ONNX
from tvm_adaptive.models.frontend.reader import ModelReader
from tvm_adaptive.models.frontend.reading import Form, Shapes
from tvm_adaptive.models.frontend.relax_file import RELAX
from tvm_adaptive.models.frontend.torch_program import PROGRAM

# To read another kind of file, write its form in a file of its own and name it here.
FORMATS: dict[str, Form] = {".onnx": ONNX, ".pt2": PROGRAM, ".json": RELAX}


def load(
    what: str, input_shapes: Shapes | None = None, *, reader: ModelReader | None = None
) -> Network | TIRWorkload:
    """Return a network or an operator by its name, its file or its factory.

    Parameters
    ----------
    what : str
        A file whose name ends as one of :data:`FORMATS`; ``"package.module:factory"``,
        see :mod:`tvm_adaptive.models.frontend.factory`; or a name that
        :func:`~tvm_adaptive.models.load_workload` knows.
    input_shapes : mapping of str to sequence of int, or None, default None
        Extents by the names of inputs, for those with dynamic shapes. Where there is one
        input only, ``""`` names it, too.
    reader : ModelReader or None, default None
        Reads files; None for a worker that is started for this one, and ends when the
        network's original is closed.

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
        return _read(path, shapes, reader)
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


def _read(path: Path, shapes: Shapes, reader: ModelReader | None) -> Network:
    found: Network | None = None
    mine = reader or ModelReader()
    try:
        found = mine.read(FORMATS[path.suffix], path, slug(path.stem), shapes)
        return found
    finally:
        if reader is None and (found is None or found.original is None):
            mine.close()


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
