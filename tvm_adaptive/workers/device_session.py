"""Where this process runs what was compiled: on its own machine, or on a device elsewhere.

A worker that has leased a device (:mod:`tvm_adaptive.runner.rpc.lease`) runs everything there;
what loads and runs modules here need not know which of the two it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from tvm_adaptive._tvm import device, load_module, tvm


class _CurrentDevice:
    session: Any = None  # of TVM's RPC; None for this machine
    n_moves = 0
    n_uploads = 0
    loaded: ClassVar[dict[tuple[str, int, int], Any]] = {}


def move_to(session: Any) -> None:
    """Run on the device of an RPC session from now on; with None on this machine.

    What was loaded elsewhere cannot be used any more.
    """
    _CurrentDevice.session = session
    _CurrentDevice.n_moves += 1
    _CurrentDevice.loaded.clear()


def is_elsewhere() -> bool:
    """Say whether modules run on a device that is not this machine's."""
    return _CurrentDevice.session is not None


def n_moves() -> int:
    """Return a number that differs whenever what was loaded is lost."""
    return _CurrentDevice.n_moves


def load(path: str) -> Any:
    """Load a compiled module where it will run."""
    if _CurrentDevice.session is None:
        return load_module(path)
    return _CurrentDevice.session.load_module(_upload(path))


def load_once(path: str) -> Any:
    """Load a compiled module, unless the same file was loaded here before.

    TVM keeps whatever it loaded until the process ends: each load of a network would cost
    the memory of its weights again.
    """
    stat = Path(path).stat()
    key = (path, stat.st_mtime_ns, stat.st_size)
    if key not in _CurrentDevice.loaded:
        _CurrentDevice.loaded[key] = load(path)
    return _CurrentDevice.loaded[key]


def place(kind: str, index: int = 0) -> Any:
    """Return a device of the station, e.g. its second GPU for ``("cuda", 1)``."""
    return (
        device(kind, index)
        if _CurrentDevice.session is None
        else _CurrentDevice.session.device(kind, index)
    )


def function(name: str) -> Any:
    """Return one of TVM's global functions, to be called at the station."""
    if _CurrentDevice.session is None:
        return tvm.get_global_func(name)
    return _CurrentDevice.session.get_function(name)


def save_linked(path: str, library: str) -> None:
    """Let the device link an archive of objects for itself, and fetch the library.

    This machine needs no linker for the device's kind then.
    """
    content = _CurrentDevice.session.download_linked_module(_upload(path))
    Path(library).write_bytes(bytes(content))


def _upload(path: str) -> str:
    """Copy a file to the device under a name that nothing was loaded from."""
    _CurrentDevice.n_uploads += 1
    name = f"{_CurrentDevice.n_uploads}-{Path(path).name}"
    _CurrentDevice.session.upload(path, name)
    return name
