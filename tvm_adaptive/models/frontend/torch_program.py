"""PyTorch programs: files of ``torch.export.save``, and modules in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import IRModule
from tvm_adaptive.errors import InvalidOptionError, as_invalid_option, summary_line
from tvm_adaptive.models.frontend.reader import (
    Array,
    FileFormat,
    Inference,
    check_package,
    framework_version,
)
from tvm_adaptive.models.frontend.shapes import Shapes, network_of_imported
from tvm_adaptive.models.frontend.torch_flat import FlatModel, flat_module, flat_program, quiet
from tvm_adaptive.models.frontend.torch_import import relax_of_torch
from tvm_adaptive.models.frontend.torch_shapes import with_fixed_shapes
from tvm_adaptive.models.network import Network, Original

_MISFIT = "is no program of torch.export.save, or a damaged one"
# Records of these names make PyTorch unpickle objects, or load compiled code.
_CODE = re.compile(
    r"(.*/)?(data/constants/(custom_obj|opaque_obj)_|data/aotinductor/).*", re.DOTALL
)
# How PyTorch names a container that the packages imported here do not define.
_UNKNOWN_CONTAINER = re.compile(r"Deserializing (\S+) in pytree .*not registered")
_MAX_CONTAINERS = 100

_PICKLED = (
    "{path} holds pickled objects or compiled code, which could do anything when they are "
    "read. Export it again, with tensors, numbers and plain containers as example inputs, "
    "and save it with torch.export.save of a recent PyTorch; or name a function that "
    "returns the module: package.module:function."
)
_OLDER = (
    "{path} was saved by PyTorch 2.7 or older. Read it with torch.export.load of a recent PyTorch, "
    "and save the program again with torch.export.save."
)


def read_program(path: Path, shapes: Shapes) -> IRModule:
    """Read a file that ``torch.export.save`` wrote."""
    program = with_fixed_shapes(load_program(path), shapes, str(path))
    return relax_of_torch(str(path), flat_program(program))


def load_program(path: Path) -> Any:
    """Read a file; the environment of the process keeps PyTorch from unpickling."""
    return _load(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)  # the file is run after it was read
def _load(path: Path, _changed_ns: int) -> Any:
    import torch

    programs = None
    try:
        names = torch._C.PyTorchFileReader(str(path)).get_all_records()
        if not any(_CODE.fullmatch(name) for name in names):
            programs = _load_with_containers(path)
    except Exception as error:  # zip, JSON and pickle errors, and PyTorch's own
        if _is_of_older_pytorch(path):
            raise InvalidOptionError(_OLDER.format(path=path)) from error
        if "Weights only load failed" not in str(error):
            raise InvalidOptionError(f"{path} {_MISFIT}: {summary_line(error)}") from error
    if programs is None:
        raise InvalidOptionError(_PICKLED.format(path=path))
    return _only_program(programs, path)


def _is_of_older_pytorch(path: Path) -> bool:
    """Say whether a file is a program as PyTorch 2.7 saved it: a zip file without a folder."""
    with (
        contextlib.suppress(OSError, ValueError, zipfile.BadZipFile),
        zipfile.ZipFile(path) as archive,
    ):
        return "serialized_exported_program.json" in archive.namelist()
    return False


def _only_program(programs: Mapping[str, Any], path: Path) -> Any:
    """Return the program that torch.export.load would return, or the only one of another name."""
    if not programs:
        raise InvalidOptionError(f"{path} {_MISFIT}: it holds no program.")
    if "model" not in programs and len(programs) > 1:
        raise InvalidOptionError(
            f"{path} holds several programs: {', '.join(sorted(programs))}. Save the one to be "
            "tuned with torch.export.save, in a file of its own."
        )
    return programs.get("model", next(iter(programs.values())))


def _load_with_containers(path: Path) -> dict[str, Any]:
    """Read programs by name; containers of packages that are not imported are stood in for."""
    # torch.export.load calls it, and hides why it fails.
    from torch.export.pt2_archive._package import load_pt2

    for _ in range(_MAX_CONTAINERS):
        try:
            return dict(load_pt2(str(path)).exported_programs)
        except Exception as error:  # of another class in other versions
            unknown = _UNKNOWN_CONTAINER.search(str(error))
            if unknown is None:
                raise
            _register_container(unknown[1])
    raise ValueError(f"its inputs or outputs have more than {_MAX_CONTAINERS} kinds of containers")


def _register_container(name: str) -> None:
    """Give PyTorch a container of a name; no code of its package is imported or run."""
    import torch

    pytree = torch.utils._pytree

    class Container:
        def __init__(self, children: Sequence[Any], context: str) -> None:
            self.children, self.context = list(children), context

    def with_keys(each: Container) -> tuple[list[tuple[Any, Any]], str]:
        return [(pytree.SequenceKey(i), c) for i, c in enumerate(each.children)], each.context

    pytree.register_pytree_node(
        Container,
        lambda each: (each.children, each.context),
        Container,
        serialized_type_name=name,
        to_dumpable_context=str,
        from_dumpable_context=str,
        flatten_with_keys_fn=with_keys,
    )


def network_of_program(program: Any, name: str, shapes: Shapes, source: str) -> Network:
    """Import a ``torch.export.ExportedProgram``."""
    flat = flat_program(with_fixed_shapes(program, shapes, source))
    return _network(flat, name, shapes, source)


def network_of_module(
    module: Any,
    inputs: Sequence[Any],
    named: Mapping[str, Any],
    *,
    name: str,
    shapes: Shapes,
    source: str,
) -> Network:
    """Import a ``torch.nn.Module`` in evaluation mode with its arguments."""
    check_package(PROGRAM, source)
    import torch

    with contextlib.suppress(NotImplementedError):  # a program's module has no modes
        module.eval()
    try:
        with quiet():
            program = torch.export.export(module, tuple(inputs), dict(named))
    except Exception as error:  # PyTorch's own, or of the user's code
        reason = f"{type(error).__name__}: {summary_line(error)}"
    else:
        return network_of_program(program, name, shapes, source)
    with as_invalid_option(f"{source} does not run with its example inputs"):
        flat = flat_module(module, tuple(inputs), named)
    return _network(flat, name, shapes, source, reason)


def _network(
    flat: FlatModel, name: str, shapes: Shapes, source: str, unexported: str = ""
) -> Network:
    mod = relax_of_torch(source, flat, unexported)
    file = None if flat.program is None else functools.partial(_save_program, flat.program)
    original = Original(framework_version(*_FRAMEWORK), flat.run, file=file)
    return network_of_imported(name, mod, shapes, original=original, source=source)


def open_program(path: Path, inputs: Sequence[Array], n_threads: int | None) -> Inference:
    """Open a file in PyTorch, as it was exported: neither compiled nor frozen."""
    import torch

    if n_threads is not None:
        torch.set_num_threads(n_threads)
    return flat_program(load_program(path)).opened(inputs)


def open_compiled(path: Path, inputs: Sequence[Array], n_threads: int | None) -> Inference:
    """Open a file in PyTorch, compiled by Inductor with its weights frozen."""
    import torch
    from torch._inductor import config

    if n_threads is not None:
        torch.set_num_threads(n_threads)
    config.freezing = True  # of this process, which does nothing else
    model = flat_program(load_program(path))
    return dataclasses.replace(model, module=torch.compile(model.module)).opened(inputs)


def _save_program(program: Any, folder: Path) -> Path:
    import torch

    path = folder / "model.pt2"
    torch.export.save(program, path)
    return path


_FRAMEWORK = ("PyTorch", "torch")
PROGRAM = FileFormat(
    read_program,
    _MISFIT,
    "torch",
    "'tvm-adaptive[torch]'",
    _FRAMEWORK,
    open_program,
    peer="torch",
    least_version=(2, 13),  # of the extra
)
