"""The device on which this process runs compiled modules: this machine's or a leased one."""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from tvm_adaptive._tvm import device, from_dlpack, load_module, tvm
from tvm_adaptive._tvm.loading import load_until_dropped
from tvm_adaptive.workers.scratch import ScratchFolder

# A file of this machine: path, inode, time and size.
_File: TypeAlias = tuple[str, int, int, int]


class _CurrentDevice:
    session: Any = None  # of TVM's RPC; None for this machine
    index = 0  # of the devices of a kind
    n_uploads = 0
    caches: ClassVar[dict[str, dict[Any, Any]]] = {}


class Library:
    """A compiled module of this process, which is unloaded when nothing holds or uses it."""

    def __init__(self, module: Any) -> None:
        self.module = module


# The file that this process has loaded first, by path.
_loaded: dict[str, _File] = {}
# A file's code knows the module that was made of it last, which must not be dropped before
# others of the same file: where one can be dropped, all share it.
_kept: dict[_File, Any] = {}
_open: weakref.WeakValueDictionary[_File, Library] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def move_to(session: Any) -> None:
    """Run on the device of an RPC session, with None on this machine; unloads all modules."""
    # What is left of a session would keep it open, and its device occupied.
    for each in _CurrentDevice.caches.values():
        each.clear()
    _CurrentDevice.session = session


def cache(name: str) -> dict[Any, Any]:
    """Return a dictionary for modules and tensors, which is emptied when the device changes."""
    return _CurrentDevice.caches.setdefault(name, {})


def use_device(index: int) -> None:
    """Let this process use the device of this number, of each kind."""
    _CurrentDevice.index = index


def is_elsewhere() -> bool:
    """Say whether modules run on a device of another machine."""
    return _CurrentDevice.session is not None


def load(path: str) -> Any:
    """Load a compiled module on the current device, until this process ends."""
    session = _CurrentDevice.session
    if session is not None:
        return session.load_module(_upload(path))
    file = _file_at(path)
    module = _kept[file] = _load_file(path, file, load_module)
    return module


def open_library(path: str) -> Library:
    """Load a compiled module in this process, unless the same file is loaded."""
    file = _file_at(path)
    with _opening:
        found = _open.get(file)
        if found is None:
            module = _kept.get(file)
            if module is None:
                module = _load_file(path, file, load_until_dropped)
            found = _open[file] = Library(module)
        return found


def _file_at(path: str) -> _File:
    stat = os.stat(path)
    return os.path.realpath(path), stat.st_ino, stat.st_mtime_ns, stat.st_size


def _load_file(path: str, file: _File, load_path: Callable[[str], Any]) -> Any:
    """Load a file, whatever was loaded from its path before."""
    if _loaded.setdefault(file[0], file) == file:
        return load_path(path)
    # The system knows a library by its path, and would return the one that was there before.
    # On NFS the folder stays while the copy is loaded.
    with ScratchFolder("library", Path(path).parent) as folder:
        return load_path(shutil.copy(path, str(folder)))


def load_once(path: str) -> Any:
    """Load a compiled module unless the same file is loaded: it stays loaded."""
    key = _file_at(path)
    loaded = cache("modules")
    if key not in loaded:
        loaded[key] = load(path)
    return loaded[key]


def device_of_kind(kind: str) -> Any:
    """Return TVM's object for this process's device of a kind, or the session's first."""
    session, index = _CurrentDevice.session, _CurrentDevice.index
    return device(kind, index) if session is None else session.device(kind, index)


def shared(array: Any) -> Any:
    """Return a tensor of this machine that has an array's memory."""
    return from_dlpack(array)


def function(name: str) -> Any:
    """Return one of TVM's global functions on the current device."""
    session = _CurrentDevice.session
    return tvm.get_global_func(name) if session is None else session.get_function(name)


def save_linked(path: str, library: str) -> bool:
    """Fetch an archive's library, which the leased device links: it has the linker."""
    content = _CurrentDevice.session.download_linked_module(_upload(path))
    # A part of a library, as a full disk leaves it, would be deployed.
    fresh = Path(f"{library}.new")
    try:
        fresh.write_bytes(bytes(content))
        os.replace(fresh, library)
    finally:
        fresh.unlink(missing_ok=True)
    return True


def _upload(path: str) -> str:
    """Copy a file to the leased device under a new name."""
    _CurrentDevice.n_uploads += 1
    name = f"{_CurrentDevice.n_uploads}-{Path(path).name}"
    _CurrentDevice.session.upload(path, name)
    return name
