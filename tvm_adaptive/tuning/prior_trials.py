"""Prior trials of a run's tasks: seeds for the search, samples for the model.

===================  =============================  ==========================
records of           seeds                          samples
===================  =============================  ==========================
the same task        measured first, as they are    yes
its family           fitted to the task's extents   yes
another target       fitted to the task's extents   no: other machines differ
another environment  measured first, as they are    no: other machines differ
===================  =============================  ==========================

An environment is a device with a version of TVM (:mod:`tvm_adaptive.workers.environment`);
an unknown one counts as another. The run's own tasks are read first, then relatives, the newest
of each family in turns, until a time limit: no store delays a search for long. The seeds are the
winners of play-offs and the fastest candidates that were in none; disqualified ones are left
out. The best of a few trials is for tasks of the same extents only. Every seed is measured
again: machines are noisy, and compilers change.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from tvm_adaptive._tvm import TuneContext
from tvm_adaptive.cost_model.dataset import CAPACITY, Dataset
from tvm_adaptive.database.metaschedule import task_of
from tvm_adaptive.database.records import Features, Identity, StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.verdicts import (
    SECOND_DECISION,
    candidate_key,
    disqualified,
    proven,
    sound,
    trusted,
)
from tvm_adaptive.search_strategy.transfer import (
    KEPT_PER_TASK,
    MIN_TO_TELL,
    TransferPool,
    TransferRecord,
    transfer_record_of,
)
from tvm_adaptive.task_scheduler.arms import PriorTrials
from tvm_adaptive.values.hooks import ModelHooks
from tvm_adaptive.values.trial import FloatArray

logger = logging.getLogger(__name__)

# Samples of one task, and of all tasks: the run's forest is refitted after every batch, from
# this many in a fifth of a second.
_SAMPLES_PER_TASK = 64
_MAX_SAMPLES = 1500
# Related tasks per family: a store of years must not delay a run's start.
_MAX_RELATED = 64
# Seconds after which no further related task is read, and their share of the search's. A relative
# takes some 30 round trips: with a server 5 ms away, 64 of each of ten families take 100 s, in
# which a search measures several batches.
_RELATED_SEC = 10.0
_RELATED_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Counts of what a store holds for a run, and its tasks' prior trials."""

    n_known: int = 0  # tasks that other runs have tuned on this target
    n_related: int = 0  # other tasks with related tasks in the store
    n_samples: int = 0  # samples for the model
    tasks: Mapping[str, PriorTrials] = dataclasses.field(default_factory=dict)  # by name
    n_left_out: int = 0  # invalid rows of the store


def find_prior_trials(
    store: RecordStore,
    contexts: Sequence[TuneContext],
    transfer_pool: TransferPool | None,
    model: ModelHooks | None,
    *,
    without: Collection[str] = (),
    n_prior: Mapping[str, int] = MappingProxyType({}),
    search_sec: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> WarmStart:
    """Give a store's prior trials to the transfer pool and the model, and return them.

    Trials of the runs ``without`` are seeds and count for nothing else. ``n_prior`` limits the
    history of a task, by its name, to that many of its oldest trials. A search of
    ``search_sec`` begins with fewer related tasks where the store takes long.
    """
    end_sec = clock() + min(_RELATED_SEC, _RELATED_SHARE * search_sec)
    tasks = [task_of(each.mod, each.target, str(each.task_name)) for each in contexts]
    own = {task.identity: task for task in tasks}
    targets = {task.target for task in tasks}
    known: dict[Identity, StoredTask] = {}
    samples = Dataset()
    for task in itertools.chain(own.values(), _related(store, own, lambda: clock() < end_sec)):
        here, elsewhere = _transfer_records(store, task)
        if not (here or elsewhere):
            continue
        known[task.identity] = task
        is_target = task.target in targets
        if transfer_pool is not None and task.identity in own:
            transfer_pool.remember(task.family, task.name, here + elsewhere)
        elif transfer_pool is not None:
            name = str(task.identity)
            transfer_pool.remember(task.family, name, here if is_target else [])
            transfer_pool.hint(task.family, name, elsewhere if is_target else here + elsewhere)
        if model is not None and is_target and len(samples) < _MAX_SAMPLES:
            _add_samples(samples, store, task, without, model.n_features)
    if model is not None:
        model.preload(samples)
    prior = {}
    for task in tasks:
        # A search that does not start from the best of them cannot be compared with them.
        is_seeded = transfer_pool is not None and task.identity in known
        finals = store.finals(task)
        seconds = _seconds(store, task, finals, without) if is_seeded else []
        # A resumed search measures none of them again: what came since has no common scale.
        seconds = seconds[: n_prior.get(task.name)]
        is_proven = proven(finals) is not None
        if seconds or is_proven:
            prior[task.name] = PriorTrials(tuple(sec * 1e3 for sec in seconds), is_proven)
    n_known, families = 0, set[str]()
    for task in known.values():
        is_own = task.identity in own
        # Of the relatives in a family, one is enough.
        if (is_own or task.family not in families) and _is_of_others(store, task, without):
            n_known += is_own
            families.add(task.family)
    n_related = sum(task.family in families for task in tasks) - n_known
    return WarmStart(n_known, n_related, len(samples), prior, store.n_left_out)


def _transfer_records(
    store: RecordStore, task: StoredTask
) -> tuple[list[TransferRecord], list[TransferRecord]]:
    """Return a task's records of the store's environment, and those of others.

    How many trials others had is not known: an export holds the best of them alone.
    """
    here: list[TransferRecord] = []
    elsewhere: list[TransferRecord] = []
    for trial in trusted(store, task, KEPT_PER_TASK):
        seconds = math.nan if trial.seconds is None else trial.seconds
        record = transfer_record_of(json.loads(trial.record), seconds)
        if record is not None:  # None for one that this version cannot read
            is_here = store.environment in (None, trial.environment)
            record = dataclasses.replace(record, is_here=is_here)
            (here if is_here else elsewhere).append(record)
    if here and not store.has_trials(task, MIN_TO_TELL):
        here = [dataclasses.replace(each, is_of_few=True) for each in here]
    return here, elsewhere


def _is_of_others(store: RecordStore, task: StoredTask, without: Collection[str]) -> bool:
    """Say whether a task has times or verdicts of other runs than those ``without``."""
    if not without:
        return True
    anywhere = store.at(None)
    if anywhere.best(task, 1, without=without):
        return True
    runs = {each.run.removesuffix(SECOND_DECISION) for each in anywhere.finals(task)}
    return not runs <= set(without)


def _related(
    store: RecordStore, own: Mapping[Identity, StoredTask], has_time: Callable[[], bool]
) -> Iterator[StoredTask]:
    """Yield the latest of a store's other tasks, without workloads, a run's families in turns."""
    latest: list[list[StoredTask]] = []
    for family, n_own in Counter(task.family for task in own.values()).items():
        if not has_time():
            break
        found = store.tasks(family=family, newest=_MAX_RELATED + n_own, with_workload=False)
        others = [task for task in reversed(found) if task.identity not in own]
        latest.append(others[:_MAX_RELATED])
    for task in itertools.chain.from_iterable(itertools.zip_longest(*latest)):
        if not has_time():
            return
        if task is not None:
            yield task


def _seconds(
    store: RecordStore,
    task: StoredTask,
    finals: Sequence[StoredTrial],
    without: Collection[str],
) -> list[float]:
    """Return the seconds of a task's trials; NaN for failed and for disqualified ones."""
    lost = disqualified(finals)
    if not lost:  # nearly always: spares reading all records
        return store.seconds(task, without=without)
    return [
        math.nan if each.seconds is None or candidate_key(each) in lost else each.seconds
        for each in store.latest(task)
        if each.run not in without
    ]


def restore(
    store: RecordStore,
    contexts: Sequence[TuneContext],
    model: ModelHooks | None,
    lost: Mapping[str, Container[str]] = MappingProxyType({}),
) -> int:
    """Give a cost model the samples of earlier attempts of the same run; return how many.

    Candidates that are ``lost``, by the keys of their workloads, are left out.
    """
    n_samples = 0
    if model is None:
        return n_samples
    known = set[Identity]()
    for context in contexts:
        task = task_of(context.mod, context.target, str(context.task_name))
        if task.identity in known:  # of equal tasks, the store has one
            continue
        known.add(task.identity)
        without = lost.get(task.workload_key)
        # The model would drop more.
        trials = store.sample(task, CAPACITY, with_record=without is not None)
        if without is not None:
            trials = [each for each in trials if candidate_key(each) not in without]
        for rows, seconds, errors in _arrays(trials, model.n_features):
            model.restore(context, rows, seconds, errors)
            n_samples += len(seconds)
    return n_samples


def _add_samples(
    samples: Dataset, store: RecordStore, task: StoredTask, without: Collection[str], width: int
) -> None:
    """Add a sample of a task's trials, without those of some runs and of what is disqualified."""
    sampled = store.sample(task, _SAMPLES_PER_TASK, without=without, width=width)
    for rows, seconds, errors in _arrays(sound(store.finals(task), sampled), width):
        samples.add("/".join(task.identity), rows, seconds, errors)


def _arrays(
    trials: Sequence[StoredTrial], width: int
) -> Iterator[tuple[Features, FloatArray, FloatArray]]:
    """Yield features, seconds and errors of the trials of so many features; once, or not at all.

    Another version of the package has another number of features.
    """
    usable = [t for t in trials if t.features is not None and len(t.features) == width]
    if usable:
        yield (
            np.stack([trial.features for trial in usable if trial.features is not None]),
            np.array([math.nan if trial.seconds is None else trial.seconds for trial in usable]),
            np.array([math.nan if trial.error is None else trial.error for trial in usable]),
        )
