"""Files that load a deployed network from C and C++, on machines without Python."""

from __future__ import annotations

import os
import re
import shutil
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tvm_adaptive._tvm import Target
from tvm_adaptive._tvm.runtime_files import (
    HEADERS,
    architecture_of,
    header_folder,
)
from tvm_adaptive.tuning.manifest import Interface, TensorInfo
from tvm_adaptive.tuning.session import RunContext
from tvm_adaptive.values.cpu_features import CpuFeature

_TEMPLATES = Path(__file__).with_name("templates")
# The same for every network.
_LOADER = ("tvm_adaptive.h", "tvm_adaptive.c")
_EXAMPLES = ("example.c", "example.cc")
# Names that other programs have, too.
PLAIN_NAMES = ("CMakeLists.txt", *_EXAMPLES)
# What compilers of C define, by the beginnings of LLVM's names.
_MACROS = {
    "x86_64": "__x86_64__",
    "aarch64": "__aarch64__",
    "arm64": "__aarch64__",
    "arm": "__arm__",
    "riscv": "__riscv",
    "powerpc64": "__powerpc64__",
}
_MAX_DIMS = 16  # TVM_ADAPTIVE_MAX_DIMS in tvm_adaptive.h


def filled(name: str, values: Mapping[str, object]) -> str:
    """Return the text of a template with its values."""
    text = (_TEMPLATES / f"{name}.template").read_text(encoding="utf-8")
    return string.Template(text).substitute(values)


def is_supported(interface: Interface) -> bool:
    """Say whether C programs can run a network: all its sizes are known before it runs."""
    tensors = [*interface.inputs, *(interface.outputs or ())]
    return interface.outputs is not None and all(
        each.n_bytes is not None and len(each.shape) <= _MAX_DIMS for each in tensors
    )


def write_programs(
    context: RunContext,
    interface: Interface,
    library: Path,
    features: Mapping[str, CpuFeature],
    runtime: Sequence[Path],
    *,
    n_threads: int,
) -> list[Path]:
    """Write the loader, the network's description, TVM's files and examples; return these."""
    folder = context.work_dir
    for name in _LOADER:
        shutil.copyfile(_TEMPLATES / name, folder / name)
    for name in HEADERS:
        (folder / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(header_folder() / name, folder / "include" / name)
    # A farm's devices may have another processor, and need the files of its wheels.
    for path in runtime if context.farm is None else ():
        _put(path, folder / path.name)
    # What a farm has not linked is linked to this name by the user.
    name = library.with_suffix(".so").name
    identifier = identifier_of(name)
    header = model_header(name, context.target, interface, features, n_threads)
    (folder / f"{identifier}.h").write_text(header, encoding="utf-8")
    values = {
        "library": name,
        "identifier": identifier,
        "header": f"{identifier}.h",
        "link_options": " ".join(f"-l{path.stem.removeprefix('lib')}" for path in runtime),
    }
    for name in PLAIN_NAMES:
        (folder / name).write_text(filled(name, values), encoding="utf-8")
    return [folder / name for name in _EXAMPLES]


def _put(source: Path, target: Path) -> None:
    """Copy a library; programs that run with the one that is there keep it."""
    fresh = target.with_name(f".{target.name}.new")
    shutil.copy(source, fresh)
    os.replace(fresh, target)


def identifier_of(library: str) -> str:
    """Return the name of a network's description in C, e.g. ``"resnet18_model"``.

    The ending keeps it apart from C's keywords, and its header from others.
    """
    name = re.sub(r"\W", "_", Path(library).stem, flags=re.ASCII)
    # What begins with the package's name is the interface's own.
    is_taken = name[0].isdigit() or name.startswith("tvm_adaptive")
    return f"{'n' if is_taken else ''}{name}_model"


def model_header(
    library: str,
    target: Target,
    interface: Interface,
    features: Mapping[str, CpuFeature],
    n_threads: int,
) -> str:
    """Return a header that describes a network to the loader."""
    outputs = interface.outputs or ()
    identifier, architecture = identifier_of(library), architecture_of(target)
    return filled(
        "model.h",
        {
            "library": library,
            "identifier": identifier,
            "guard": f"{identifier.upper()}_H",
            "architecture": architecture,
            "is_architecture": _is_compiled_for(architecture),
            "n_threads": n_threads,
            "inputs": _rows(map(_tensor, interface.inputs)),
            "outputs": _rows(map(_tensor, outputs)),
            "n_inputs": len(interface.inputs),
            "n_outputs": len(outputs),
            "cpu_features": _rows(_feature(*each) for each in features.items()),
            "n_cpu_features": len(features),
        },
    )


def _is_compiled_for(architecture: str) -> str:
    """Return the condition by which C compilers tell an architecture of LLVM's, 1 if unknown."""
    macros = (name for prefix, name in _MACROS.items() if architecture.startswith(prefix))
    macro = next(macros, None)
    return "1" if macro is None else f"defined({macro})"


def _rows(rows: Iterable[str]) -> str:
    # An array of C has at least one element.
    return "\n".join(f"    {row}," for row in rows) or "    {0},"


def _tensor(info: TensorInfo) -> str:
    extents = ", ".join(map(str, info.shape)) or "0"
    name, dtype = _text(info.name), _text(info.dtype)
    return f"{{{name}, {dtype}, {len(info.shape)}, {{{extents}}}, {info.n_bytes}}}"


def _feature(name: str, feature: CpuFeature) -> str:
    numbers = f"{feature.leaf:#x}, {feature.subleaf}, {feature.register}, {feature.bit}"
    return f"{{{_text(name)}, {numbers}, {feature.xcr0:#x}}}"


def _text(text: str) -> str:
    """Return a literal of C; what is more than a plain letter or digit is an octal escape."""
    plain = set(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:+ ")
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode()) + '"'
