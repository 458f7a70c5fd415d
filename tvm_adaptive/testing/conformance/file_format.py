"""Rules for every format of model files, checked in the worker that reads them."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from pathlib import Path

import numpy as np

from tvm_adaptive._tvm import module_key
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import Network, compile_network, prepare, run_network
from tvm_adaptive.models.frontend.peers import PEERS
from tvm_adaptive.models.frontend.reader import LATE, FileFormat, ModelReader
from tvm_adaptive.models.frontend.shapes import Shapes
from tvm_adaptive.models.network import main_of
from tvm_adaptive.testing.conformance.raising import must_not_raise
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.workers.scratch import ScratchFolder

# Takes the place of a format's own words: the reader says it of errors of any other kind.
_OTHER_ERROR = "made the format end with an error other than InvalidOptionError"
# More than the headers of most formats.
_N_RANDOM_BYTES = 4096


def check_file_format(
    file_format: FileFormat, path: str | Path, shapes: Shapes | None = None, *, seed: int = 0
) -> None:
    """Run all checks of a format with one of its files.

    The network is compiled without tuning where the format has a framework to compare with, so
    choose a small file.

    Parameters
    ----------
    file_format : FileFormat
    path : str or Path
        A file that the format can read.
    shapes : mapping of str to sequence of int, or None, default None
        Extents of the inputs whose shapes the file leaves open, by name.
    seed : int, default 0
        Of random inputs and bytes.

    Raises
    ------
    AssertionError
        With the rule, and what the format did.
    """
    check_peer(file_format, Path(path))
    reader = ModelReader()
    try:
        network = _read(reader, file_format, Path(path), shapes or {})
        check_inputs(network)
        check_repeats(network, _read(reader, file_format, Path(path), shapes or {}))
        check_damage(reader, file_format, Path(path), shapes or {}, seed)
        check_original(network, seed)
    finally:
        reader.close()


def check_peer(file_format: FileFormat, path: Path) -> None:
    """Require that the framework that is timed beside the library is one that opens the file."""
    name = file_format.peer
    if not name:
        return
    assert name in PEERS, f"the peer must be one of {', '.join(PEERS)} but is {name!r}"
    assert path.suffix in PEERS[name].open, (
        f"the peer is {name}, but {PEERS[name].title} opens no {path.suffix} files"
    )


def check_inputs(network: Network) -> None:
    """Require that inputs have names, by which users give shapes and arrays."""
    names = [str(variable.name) for variable in main_of(network.mod).params]
    assert all(name.strip() for name in names), f"every input needs a name but they are {names}"
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"every input needs a name of its own but there are two of {twice}"


def check_repeats(first: Network, second: Network) -> None:
    """Require the same module from the same file: a resumed run compares them."""
    for name in ("input_shapes", "input_dtypes"):
        one, other = getattr(first, name), getattr(second, name)
        assert one == other, f"the {name} of a file were {one}, and {other} the second time"
    assert module_key(first.mod) == module_key(second.mod), (
        "a file was read to another module the second time"
    )


def check_damage(
    reader: ModelReader, file_format: FileFormat, path: Path, shapes: Shapes, seed: int
) -> None:
    """Require that a file which is no model is refused, in words that name it."""
    whole = path.read_bytes()
    damaged = {
        "an empty file": b"",
        "the first half of the file": whole[: len(whole) // 2],
        "random bytes": np.random.default_rng(seed).bytes(_N_RANDOM_BYTES),
        "a file of text": b"This is no model.\n",
        "a file of JSON": b'{"format": "of another program"}\n',
        "a zip archive": _archive(),
    }
    watched = dataclasses.replace(file_format, misfit=_OTHER_ERROR)
    with ScratchFolder("conformance") as folder:
        for number, (what, content) in enumerate(damaged.items()):
            copy = folder / f"damaged{number}{path.suffix}"
            copy.write_bytes(content)
            refusal = _refusal_of(reader, watched, copy, shapes)
            assert refusal, f"{what} must be refused but was read as a model"
            assert _OTHER_ERROR not in refusal, what + refusal.partition(str(copy))[2]
            assert LATE not in refusal, f"{what} must be refused in time: {refusal}"
            assert str(copy) in refusal, (
                f"{what} was refused in words that do not name the file: {refusal}"
            )


def check_original(network: Network, seed: int) -> None:
    """Require the results of the file's own framework, if the format has one."""
    if network.original is None:
        return
    inputs = network.inputs(seed)
    with must_not_raise(f"{network.original.framework}, which opens the file with its inputs,"):
        expected = network.original.run(inputs)
    target = resolve_target("cpu")
    with must_not_raise("compiling and running the imported network"):
        outputs = run_network(compile_network(prepare(network, target), None, target), inputs)
    # As a run compares them before it tunes.
    problem = network.problem_beside_framework(outputs, expected, DEFAULT.finish.rtol)
    assert problem is None, (
        f"the network computes other results than {network.original.framework}: {problem}"
    )


def _read(reader: ModelReader, file_format: FileFormat, path: Path, shapes: Shapes) -> Network:
    with must_not_raise(f"reading {path}"):
        return reader.read(file_format, path, path.stem, shapes)


def _refusal_of(reader: ModelReader, file_format: FileFormat, path: Path, shapes: Shapes) -> str:
    """Return why a file cannot be read; empty if it can."""
    try:
        reader.read(file_format, path, path.stem, shapes)
    except InvalidOptionError as error:
        return str(error)
    return ""


def _archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme.txt", "This is no model.\n")
    return file.getvalue()
