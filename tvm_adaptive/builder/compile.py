"""What a builder's worker process does: module in, artifact out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tvm_adaptive._tvm import (
    IRModule,
    Module,
    RemoveWeightLayoutRewriteBlock,
    Target,
    Tensor,
    build_tir,
    import_tensor_intrinsics,
    load_json,
    load_param_dict,
    save_json,
    save_param_dict,
    tar,
)
from tvm_adaptive.builder.link import link_shared

BuildFunction = Callable[[IRModule, Target, dict[str, Tensor] | None], Module]
# Task in the form that crosses the process border.
CompileTask = tuple[str, str, bytes | None, str, BuildFunction | None, bool]
ARCHIVE_NAME = "candidate.tar"  # linked where it is loaded, so another machine may do it
LIBRARY_NAME = "candidate.so"


def warm_up() -> None:
    """Do nothing; to find this function, the worker has imported all it needs."""


def compile_task(
    mod: IRModule,
    target: Target,
    directory: str,
    *,
    params: Any | None = None,
    build_function: BuildFunction | None = None,
    link: bool = False,
) -> CompileTask:
    """Pack the arguments of :func:`compile_candidate`.

    Parameters
    ----------
    mod : IRModule
    target : Target
    directory : str
        Where the artifact goes; must exist.
    params : mapping of str to Tensor, or None
        Handed to ``build_function``; the default build has no use for them.
    build_function : callable or None
        ``(mod, target, params) -> Module``; None for :func:`build_candidate`.
    link : bool, default False
        To a shared library, which only a process of this machine can load.
    """
    packed = None if params is None else bytes(save_param_dict(dict(params)))
    return save_json(mod), save_json(target), packed, directory, build_function, link


def compile_candidate(
    mod_json: str,
    target_json: str,
    params: bytes | None,
    directory: str,
    build_function: BuildFunction | None,
    link: bool,
) -> str:
    """Compile a module and export it; runs in a worker.

    Returns
    -------
    str
        Path of the artifact, alone in ``directory``.
    """
    mod, target = load_json(mod_json), load_json(target_json)
    tensors = None if params is None else load_param_dict(params)
    try:
        built = (build_function or build_candidate)(mod, target, tensors)
    except Exception as error:
        if not _lacks_intrinsic(error):
            raise
        import_tensor_intrinsics()
        built = (build_function or build_candidate)(mod, target, tensors)
    path = os.path.join(directory, LIBRARY_NAME if link else ARCHIVE_NAME)
    built.export_library(path, fcompile=link_shared if link else tar)
    return path


def build_candidate(mod: IRModule, target: Target, params: dict[str, Tensor] | None) -> Module:
    """Build a module for measuring, as TVM's own builder does.

    Weights are taken in the layout that the schedule wants: the block that would
    rewrite them is removed, because at run time they are rewritten once, ahead.

    Parameters
    ----------
    mod : IRModule
    target : Target
    params : dict of str to Tensor, or None
        Not used.
    """
    del params
    return build_tir(RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(mod), target=target)


def _lacks_intrinsic(error: Exception) -> bool:
    # A scheduled module carries the bodies of its intrinsics, so this is rare; importing
    # them always would cost each worker some 12 s of CPU.
    text = str(error)
    return "TensorIntrin" in text and "is not registered" in text
