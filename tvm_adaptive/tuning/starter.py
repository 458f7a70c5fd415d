"""Starter records: what a run on x86-64 begins with where the store knows nothing yet.

===================================  =====  =======
file                                 seeds  samples
===================================  =====  =======
same instruction set and TVM         yes    yes
AVX2's, for a target with AVX-512    yes    no: other kernels are fast there
another release of TVM's             yes    no: features may have changed
===================================  =====  =======

All records count as those of relatives: they come from another machine, so that even one of the
very same task is a seed like others, only the first. Nothing goes to the task scheduler: its
forecasts continue the history of one machine.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from tvm_adaptive._tvm import TVM_VERSION, Target, TuneContext, anchor_of, has_feature
from tvm_adaptive._tvm import workload_key as workload_key_of
from tvm_adaptive._tvm.versions import release
from tvm_adaptive.cost_model.dataset import Dataset
from tvm_adaptive.database.location import STARTER_FOLDER
from tvm_adaptive.database.starter_file import StarterTask, read_starter
from tvm_adaptive.errors import StoreError
from tvm_adaptive.search_strategy.transfer import TransferPool, transfer_record_of
from tvm_adaptive.values.hooks import ModelHooks

logger = logging.getLogger(__name__)

# The best first; LLVM's name of the feature that each begins with.
INSTRUCTION_SETS = {"avx512": "avx512f", "avx2": "avx2"}
# Names of reductions' blocks begin with the operand's, another one in each network.
_OPERAND = re.compile(r"^\w+_(?=(?:red|red_temp\w*|var_sum)$)")


@dataclasses.dataclass(frozen=True)
class StarterFile:
    """A file of starter records that suits a target."""

    path: Path
    is_alike: bool  # whether it was measured with the target's instruction set

    @property
    def name(self) -> str:
        """Name in journal and messages, as ``"avx2-2"``."""
        return self.path.name.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class StarterStart:
    """Counts of what starter records gave to a run."""

    file: str
    n_tasks: int  # of the run, whose searches begin now with records of relatives
    n_related: int  # tasks of the file that are their relatives
    n_samples: int  # for the model


def instruction_set_of(target: Target) -> str:
    """Return the instruction set that starter records are named by; "" for none of them."""
    if target.kind.name != "llvm":
        return ""
    found = (name for name, key in INSTRUCTION_SETS.items() if has_feature(target, key))
    return next(found, "")


def starter_file_of(target: Target, folder: Path = STARTER_FOLDER) -> StarterFile | None:
    """Return the file of starter records that suits a target; None without one."""
    instruction_set = instruction_set_of(target)
    # What is fast with AVX2 is a hint for AVX-512; the other way, registers would be missing.
    fallbacks = {"avx512": ("avx512", "avx2"), "avx2": ("avx2",)}
    for wanted in fallbacks.get(instruction_set, ()):
        for path in sorted(folder.glob(f"{wanted}-*.json.xz")):
            return StarterFile(path, wanted == instruction_set)
    return None


def start_from(
    file: StarterFile,
    contexts: Sequence[TuneContext],
    transfer_pool: TransferPool | None,
    model: ModelHooks | None,
    *,
    begun: Collection[str] = (),
) -> StarterStart | None:
    """Give starter records to the transfer pool and the model.

    None without either of them, and for an unreadable file. Tasks that have ``begun``, by their
    names, are not counted.
    """
    if transfer_pool is None and model is None:
        return None
    names = {workload_key_of(each.mod): str(each.task_name) for each in contexts}
    anchors = [anchor_of(each.mod) for each in contexts]
    # By what the families of starter records are compared with.
    families: dict[str, set[str]] = {}
    for anchor in anchors:
        families.setdefault(without_operand(anchor), set()).add(anchor)
    try:
        header, tasks = read_starter(file.path, lambda name: without_operand(name) in families)
    except StoreError as error:
        logger.warning("%s The run begins without them.", error)
        return None
    n_tasks = 0
    if transfer_pool is not None:
        known = {without_operand(task.family) for task in tasks}
        n_tasks = sum(
            without_operand(anchor) in known and str(each.task_name) not in begun
            for each, anchor in zip(contexts, anchors, strict=True)
        )
        for task in tasks:
            found = [transfer_record_of([trace], seconds) for trace, seconds in task.records]
            # None for a record that this version cannot read.
            records = [each for each in found if each is not None]
            name = names.get(task.workload_key, f"{file.name}:{task.workload_key}")
            for family in families[without_operand(task.family)]:
                transfer_pool.hint(family, name, records)
    samples = Dataset()
    is_same_tvm = release(header.tvm)[:2] == release(str(TVM_VERSION))[:2]
    if model is not None and file.is_alike and is_same_tvm:
        samples = _samples(tasks, model.n_features)
        model.preload(samples, fading=True)
    return StarterStart(file.name, n_tasks, len(tasks), len(samples))


def _samples(tasks: Sequence[StarterTask], width: int) -> Dataset:
    samples = Dataset()
    for task in tasks:
        if len(task.seconds) and task.rows.shape[1] == width:
            samples.add(task.workload_key, task.rows, np.asarray(task.seconds))
    return samples


def without_operand(family: str) -> str:
    """Return the part of a family's name that is the same in all networks."""
    return _OPERAND.sub("", family)
