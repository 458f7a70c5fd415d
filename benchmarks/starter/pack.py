"""From the record store of the making to the file in the package."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tvm_adaptive._tvm import TVM_VERSION
from tvm_adaptive.database.records import StoredTask
from tvm_adaptive.database.starter_file import (
    StarterHeader,
    StarterTask,
    read_starter,
    write_starter,
)
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.verdicts import sound, trusted
from tvm_adaptive.search_strategy.transfer import KEPT_PER_TASK
from tvm_adaptive.tuning.starter import instruction_set_of
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.values.trace_json import choices_of
from tvm_adaptive.workers.environment import Environment, processor_name

# Half of them the fastest: more of one task add little to a forest of hundreds of tasks' samples.
SAMPLES_PER_TASK = 24


def pack_starter(
    out: Path, store_path: Path, target: Mapping[str, Any], path: Path, command: str
) -> str:
    """Write a starter file of what a making has so far; return a line about it."""
    resolved = resolve_target(target)
    done = sorted(out.glob("runs/*.done.json"))
    names = [each.name.removesuffix(".done.json") for each in done]
    with RecordStore(store_path, Environment.current(resolved)) as store:
        tasks = [_packed(store, each) for each in store.tasks()]
    header = StarterHeader(
        instruction_set=instruction_set_of(resolved),
        n_threads=int(target["num-cores"]),
        tvm=str(TVM_VERSION),
        processor=processor_name(),
        mcpu=str(target["mcpu"]),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        command=command,
        workloads=tuple(names),
    )
    kept = [each for each in tasks if each.records]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_starter(path, header, kept)
    read_starter(path)  # what was written can be read
    n_samples = sum(len(each.seconds) for each in kept)
    n_records = sum(len(each.records) for each in kept)
    size = path.stat().st_size
    return f"{path}: {len(kept)} tasks, {n_records} records, {n_samples} samples, {size} bytes"


def _packed(store: RecordStore, task: StoredTask) -> StarterTask:
    """Return a task's best records and samples."""
    best = [each for each in trusted(store, task, KEPT_PER_TASK) if each.seconds is not None]
    records = tuple(
        (list(choices_of(json.loads(each.record)[0])), each.seconds)
        for each in best
        if each.seconds is not None
    )
    sampled = sound(store.finals(task), store.sample(task, SAMPLES_PER_TASK))
    # What failed here may run elsewhere.
    samples = [each for each in sampled if each.features is not None and each.seconds is not None]
    width = max((len(each.features) for each in samples if each.features is not None), default=0)
    rows = [each.features for each in samples if each.features is not None]
    return StarterTask(
        family=task.family,
        workload_key=task.workload_key,
        name=task.name,
        records=records,
        rows=np.array(rows, dtype=np.float32).reshape(len(rows), width),
        seconds=np.array([each.seconds for each in samples], dtype=np.float64),
    )
