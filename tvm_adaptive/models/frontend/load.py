"""Load what a user names: a file, a factory, or a built-in network or operator."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tvm_adaptive._tvm import IRModule, load_json
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import Network, TIRWorkload, load_workload
from tvm_adaptive.models.frontend import sample
from tvm_adaptive.models.frontend.factory import is_factory, network_of_factory
from tvm_adaptive.models.frontend.onnx_file import ONNX
from tvm_adaptive.models.frontend.reader import FileFormat, ModelReader, Numbers
from tvm_adaptive.models.frontend.sample import Sample
from tvm_adaptive.models.frontend.shapes import Shapes
from tvm_adaptive.models.frontend.torch_program import PROGRAM

_NO_MODULE = "is no module that tvm.ir.save_json wrote with this version of TVM"


def read_relax(path: Path, _shapes: Shapes) -> IRModule:
    """Read a Relax module that ``tvm.ir.save_json`` wrote; ``main`` takes inputs only."""
    try:
        found = load_json(path.read_text(encoding="utf-8"))
    except Exception as error:  # TVM's own, of any kind
        raise InvalidOptionError(f"{path} {_NO_MODULE}: it is damaged.") from error
    if not isinstance(found, IRModule):
        raise InvalidOptionError(f"{path} {_NO_MODULE}: it holds a {type(found).__name__}.")
    return found


# To read another kind of file, write its format in a file of its own and add it here.
FORMATS: dict[str, FileFormat] = {
    ".onnx": ONNX,
    ".pt2": PROGRAM,
    ".json": FileFormat(read_relax, _NO_MODULE),
}


def load(
    what: str,
    input_shapes: Shapes | None = None,
    *,
    inputs: Sample | None = None,
    reader: ModelReader | None = None,
) -> Network | TIRWorkload:
    """Return a network or an operator by its name, its file or its factory.

    Parameters
    ----------
    what : str
        A file whose name ends as one of :data:`FORMATS`; ``"package.module:factory"``,
        see :mod:`tvm_adaptive.models.frontend.factory`; or a name for
        :func:`~tvm_adaptive.models.load_workload`.
    input_shapes : mapping of str to sequence of int, or None, default None
        Extents by the names of inputs, for those with dynamic shapes; ``""`` names the only
        input of a model that has one.
    inputs : mapping of str to ndarray, path of a file of numpy.savez, or None, default None
        Arrays by the names of the inputs. They fix the shapes, and checks and timings use
        them.
    reader : ModelReader or None, default None
        Reads files; None starts a worker for this one, which ends when the network's
        original is closed.

    Raises
    ------
    InvalidOptionError
        When there is no such model, its file is damaged, its framework is missing or too old,
        TVM cannot express it, or a shape stays dynamic; the message says what to do.
    MachineError
        When the machine failed while a file was read.
    """
    shapes: Shapes = dict(input_shapes or {})
    if inputs is None:
        return _load(what, shapes, {}, reader)
    source = "inputs" if isinstance(inputs, Mapping) else str(inputs)
    arrays = sample.read_sample(inputs)
    if Path(what).suffix in FORMATS or is_factory(what):  # others have fixed shapes
        shapes = sample.shapes_of_sample(arrays, shapes, source)
    found = _load(what, shapes, sample.numbers_of(arrays), reader)
    if not isinstance(found, Network):
        raise InvalidOptionError(f"{what} is an operator; it takes no inputs of your own.")
    try:
        return sample.with_sample(found, arrays, source)
    except InvalidOptionError:
        if found.original is not None:
            found.original.close()
        raise


def _load(
    what: str, shapes: Shapes, numbers: Numbers, reader: ModelReader | None
) -> Network | TIRWorkload:
    path = Path(what)
    if path.suffix in FORMATS:
        return _read(path, shapes, numbers, reader)
    if is_factory(what):
        return network_of_factory(what, slug(what), shapes)
    try:
        found = load_workload(what)
    except InvalidOptionError as error:
        raise InvalidOptionError(
            f"{error} A model of your own is a file that ends in {', '.join(FORMATS)}, or "
            "package.module:factory."
        ) from error
    if shapes:
        raise InvalidOptionError(f"The shapes of {what} are fixed; leave input shapes out.")
    return found


def _read(path: Path, shapes: Shapes, numbers: Numbers, reader: ModelReader | None) -> Network:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise InvalidOptionError(f"The model {path} cannot be read: {reason}.") from error
    found: Network | None = None
    used = reader or ModelReader()
    try:
        found = used.read(FORMATS[path.suffix], path, slug(path.stem), shapes, numbers)
        return found
    finally:
        if found is None or found.original is None:
            used.close()


def slug(text: str) -> str:
    """Return a name for files: letters, digits, dots and dashes."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.") or "model"
