"""Compile one candidate in a builder's worker process."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from tvm_adaptive._tvm import (
    BuilderInput,
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
from tvm_adaptive.models.prefetch import follow_hints

BuildFunction = Callable[[IRModule, Target, dict[str, Tensor] | None], Module]
ARCHIVE_NAME = "candidate.tar"  # linked by the process that loads it, on any machine
LIBRARY_NAME = "candidate.so"


def warm_up() -> None:
    """Do nothing; the import of this function is the worker's warm-up."""


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


def compile_task(
    build_input: BuilderInput, directory: str, build_function: BuildFunction | None, *, link: bool
) -> CompileTask:
    """Pack one input of MetaSchedule's builder."""
    params = build_input.params
    return CompileTask(
        mod_json=save_json(build_input.mod),
        target_json=save_json(build_input.target),
        params=None if params is None else bytes(save_param_dict(dict(params))),
        directory=directory,
        build_function=build_function,
        link=link,
    )


def compile_candidate(task: CompileTask) -> str:
    """Compile and export a module in a worker; return the artifact's path."""
    mod, target = load_json(task.mod_json), load_json(task.target_json)
    params = None if task.params is None else load_param_dict(task.params)
    build = task.build_function or build_candidate
    try:
        built = build(mod, target, params)
    except Exception as error:
        if not _lacks_intrinsic(error):
            raise
        import_tensor_intrinsics()
        built = build(mod, target, params)
    path = os.path.join(task.directory, LIBRARY_NAME if task.link else ARCHIVE_NAME)
    built.export_library(path, fcompile=link_shared if task.link else tar)
    return path


def build_candidate(mod: IRModule, target: Target, params: dict[str, Tensor] | None) -> Module:
    """Build a module for measuring, as TVM's own builder does.

    Weights come in the layout of the schedule: the block that rewrites them is removed,
    because a compiled network rewrites them once, ahead of all runs.
    """
    del params
    packed = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(mod)
    return build_tir(follow_hints(packed), target=target)


def _lacks_intrinsic(error: Exception) -> bool:
    # A scheduled module holds the bodies of its intrinsics, so this is rare; importing all
    # of them always would cost each worker some 12 s of CPU.
    text = str(error)
    return "TensorIntrin" in text and "is not registered" in text
