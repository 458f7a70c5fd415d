"""Starter records without a workload's own, or of another processor: what helps must be others'."""

from __future__ import annotations

from pathlib import Path

from benchmarks.plan import RunSpec
from tvm_adaptive._tvm import workload_key
from tvm_adaptive.database.location import STARTER_FOLDER
from tvm_adaptive.database.starter_file import read_starter, write_starter
from tvm_adaptive.models import Network, TIRWorkload, load_workload
from tvm_adaptive.tuning.starter import instruction_set_of
from tvm_adaptive.tuning.target import resolve_target


def write_others(what: str, spec: RunSpec, folder: Path) -> None:
    """Write the starter records of a method (see ``Method.starter``) into a folder."""
    write_without(STARTER_FOLDER, folder, load_workload(spec.workload))
    if what == "other-processor":
        pass_off(folder, instruction_set_of(resolve_target(spec.target)))


def write_without(source: Path, folder: Path, workload: Network | TIRWorkload) -> Path:
    """Copy files of starter records without those of the very same task.

    Parameters
    ----------
    source, folder : Path
    workload : TIRWorkload
        Of a network nearly all tasks are common ones.

    Returns
    -------
    Path
        ``folder``.

    Raises
    ------
    ValueError
        For a network.
    """
    if not isinstance(workload, TIRWorkload):
        raise ValueError(
            f"{workload.name} is a network, most of whose tasks are common. Choose methods "
            "without starter records for it."
        )
    key = workload_key(workload.mod)
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*.json.xz")):
        header, tasks = read_starter(path)
        others = [task for task in tasks if task.workload_key != key]
        write_starter(folder / path.name, header, others)
    return folder


def pass_off(folder: Path, instruction_set: str) -> None:
    """Let files of another instruction set, which a run would not take, pass for its own."""
    for path in sorted(folder.glob("*.json.xz")):
        owner, _, rest = path.name.partition("-")
        if owner == instruction_set:
            path.unlink()
        else:
            path.rename(folder / f"{instruction_set}-{rest}")
