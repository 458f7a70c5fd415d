"""Compile one candidate in a builder's worker process."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import (
    IRModule,
    Module,
    RemoveWeightLayoutRewriteBlock,
    Target,
    Tensor,
    build_tir,
    create_shared,
    import_tensor_intrinsics,
    load_own_json,
    load_param_dict,
    tar,
    without_argument_checks,
)
from tvm_adaptive.models.prefetch import follow_hints

BuildFunction = Callable[[IRModule, Target, dict[str, Tensor] | None], Module]
ARCHIVE_NAME = "candidate.tar"  # linked by the process that loads it, on any machine
LIBRARY_NAME = "candidate.so"
_LINK_TIMEOUT_SEC = 60.0


@dataclasses.dataclass(frozen=True)
class CompileTask:
    """A compilation as values that can be pickled."""

    mod_json: str
    target_json: str
    params: bytes | None  # for ``build_function``; the default build ignores them
    directory: str  # where the artifact goes; must exist
    # ``(mod, target, params) -> Module``; None for :func:`build_candidate`
    build_function: BuildFunction | None
    link: bool  # to a shared library, which only a process of this machine can load


def compile_candidate(task: CompileTask) -> str:
    """Compile and export a module in a worker; return the artifact's path."""
    mod, target = load_own_json(task.mod_json), load_own_json(task.target_json)
    params = None if task.params is None else load_param_dict(task.params)
    build = task.build_function or build_candidate
    try:
        built = build(mod, target, params)
    except Exception as error:
        # A scheduled module holds the bodies of its intrinsics, so this is rare; importing all
        # of them always would cost each worker some 12 s of CPU.
        if not ("TensorIntrin" in str(error) and "is not registered" in str(error)):
            raise
        import_tensor_intrinsics()
        built = build(mod, target, params)
    path = os.path.join(task.directory, LIBRARY_NAME if task.link else ARCHIVE_NAME)
    built.export_library(path, fcompile=link_shared if task.link else tar)
    return path


def build_candidate(mod: IRModule, target: Target, params: dict[str, Tensor] | None) -> Module:
    """Build a module for measuring, as TVM's own builder does."""
    del params
    # A compiled network rewrites its weights' layout once, ahead of all runs.
    packed = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(mod)
    # The compiler of CUDA's sources reads the architecture from the target in scope.
    with target, without_argument_checks():
        return build_tir(follow_hints(packed), target=target)


def link_shared(output: str, objects: Sequence[str] | str, options: Any = None, **_: Any) -> None:
    """Link objects to a shared library; ``fcompile`` of ``export_library``.

    TVM links an archive when it loads it, by the compiler's driver: 26 ms per candidate in
    the process that measures, while nothing else may run. The linker alone takes 3 ms, in a
    build worker beside others. The process that loads the library has TVM's runtime and the
    C library. The driver handles sources and options, and links if the linker cannot.
    """
    paths = [objects] if isinstance(objects, str) else list(objects)
    linker = shutil.which("ld")
    if linker and not options and all(path.endswith(".o") for path in paths):
        command = [linker, "-shared", "-o", output, *paths, *_libraries()]
        done = subprocess.run(command, capture_output=True, timeout=_LINK_TIMEOUT_SEC, check=False)
        if done.returncode == 0:
            return
    create_shared(output, paths, options=options)


@functools.lru_cache(maxsize=1)
def _libraries() -> tuple[str, ...]:
    """Return the paths of libm and libgcc, as the compiler says once per worker."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return ()
    found = []
    # libgcc, which is static, has conversions of half precision and 128-bit division.
    for question in ("-print-file-name=libm.so", "-print-libgcc-file-name"):
        asked = subprocess.run(
            [compiler, question],
            capture_output=True,
            text=True,
            timeout=_LINK_TIMEOUT_SEC,
            check=False,
        )
        path = asked.stdout.strip()
        # The compiler echoes a name that it does not find.
        if asked.returncode == 0 and "/" in path:
            found.append(path)
    return tuple(found)
