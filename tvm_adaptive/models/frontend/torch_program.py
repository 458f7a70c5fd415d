"""PyTorch programs: files of ``torch.export.save``, and modules in memory."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import IRModule, relax_of_exported_program
from tvm_adaptive.errors import InvalidOptionError, as_invalid_option, summary_line
from tvm_adaptive.models.frontend.reader import Array, Form, Inference, Shapes
from tvm_adaptive.models.frontend.shapes import network_of_imported
from tvm_adaptive.models.network import Network, Original, with_output_names

_MISFIT = "is no program of torch.export.save, or a damaged one"
# Records of these names make PyTorch unpickle objects, or load compiled code.
_CODE = re.compile(
    r"(.*/)?(data/constants/(custom_obj|opaque_obj)_|data/aotinductor/).*", re.DOTALL
)

_PICKLED = (
    "{path} holds pickled objects or compiled code, which could do anything when they are "
    "read. Export it again, with tensors, numbers and plain containers as example inputs, "
    "and save it with torch.export.save of a recent PyTorch; or name a function that "
    "returns the module: package.module:function."
)


def read_program(path: Path, _shapes: Shapes) -> IRModule:
    """Read a file that ``torch.export.save`` wrote."""
    program = load_program(path)
    with as_invalid_option(f"TVM cannot import {path}"):
        return with_output_names(relax_of_exported_program(program), _output_names(program))


def _output_names(program: Any) -> list[str]:
    """Return where each output is in what the program returns: ``.logits``, ``['hidden']``."""
    import torch

    pytree = torch.utils._pytree
    spec = program.call_spec.out_spec
    result = pytree.tree_unflatten(range(spec.num_leaves), spec)
    return [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(result)]


def load_program(path: Path) -> Any:
    """Read a file; the environment of the process keeps PyTorch from unpickling."""
    return _load(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)  # the file is run after it was read
def _load(path: Path, _changed_ns: int) -> Any:
    import torch

    try:
        names = torch._C.PyTorchFileReader(str(path)).get_all_records()
        if not any(_CODE.fullmatch(name) for name in names):
            return torch.export.load(str(path))
    except Exception as error:  # zip, JSON and pickle errors, and PyTorch's own
        if "Weights only load failed" not in str(error):
            raise InvalidOptionError(f"{path} {_MISFIT}: {summary_line(error)}") from error
    raise InvalidOptionError(_PICKLED.format(path=path))


def network_of_program(program: Any, name: str, shapes: Shapes, source: str) -> Network:
    """Import a ``torch.export.ExportedProgram``."""
    with as_invalid_option(f"TVM cannot import {source}"):
        mod = relax_of_exported_program(program)
    original = Original(
        _framework(),
        functools.partial(_run_program, program),
        file=functools.partial(_save_program, program),
    )
    return network_of_imported(name, mod, shapes, original=original, source=source)


def _run_program(program: Any, inputs: Sequence[Array]) -> list[Array]:
    inference = _opened(program, inputs)
    return inference.outputs(inference.run())


def _opened(program: Any, inputs: Sequence[Array]) -> Inference:
    import torch

    pytree = torch.utils._pytree
    tensors = [torch.from_numpy(value) for value in inputs]
    positional, named = pytree.tree_unflatten(tensors, program.call_spec.in_spec)
    module = program.module()
    return Inference(
        torch.inference_mode()(lambda: module(*positional, **named)),
        lambda found: [each.detach().numpy().copy() for each in pytree.tree_leaves(found)],
    )


def open_program(path: Path, inputs: Sequence[Array], n_threads: int | None) -> Inference:
    """Open a file in PyTorch, as it was exported: neither compiled nor frozen."""
    import torch

    if n_threads is not None:
        torch.set_num_threads(n_threads)
    return _opened(load_program(path), inputs)


def _save_program(program: Any, folder: Path) -> Path:
    import torch

    path = folder / "model.pt2"
    torch.export.save(program, path)
    return path


def _framework() -> str:
    return f"PyTorch {importlib.metadata.version('torch')}"


PROGRAM = Form(read_program, _MISFIT, "torch", "torch", _framework, open_program)
