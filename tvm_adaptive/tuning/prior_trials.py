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
an unknown one counts as another. The seeds are the winners of play-offs and the fastest
candidates that were in none; disqualified ones are left out. The best of a few trials is for
tasks of the same extents only. Every seed is measured again: machines are noisy, and compilers
change.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
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
    checked,
    disqualified,
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
) -> WarmStart:
    """Give a store's prior trials to the transfer pool and the model, and return them.

    Trials of the runs ``without`` are seeds and count for nothing else. ``n_prior`` limits the
    history of a task, by its name, to that many of its oldest trials.
    """
    tasks = [task_of(each.mod, each.target, str(each.task_name)) for each in contexts]
    names = {task.identity: task.name for task in tasks}
    targets = {task.target for task in tasks}
    known: dict[Identity, StoredTask] = {}
    for family in dict.fromkeys(task.family for task in tasks):
        for task in _relevant(store, family, tasks):
            here, elsewhere = _transfer_records(store, task)
            if not (here or elsewhere):
                continue
            known[task.identity] = task
            if transfer_pool is None:
                continue
            name = names.get(task.identity, str(task.identity))
            if task.identity in names:
                transfer_pool.remember(family, name, here + elsewhere)
            else:
                is_target = task.target in targets
                transfer_pool.remember(family, name, here if is_target else [])
                transfer_pool.hint(family, name, elsewhere if is_target else here + elsewhere)
    samples = Dataset()
    if model is not None:
        samples = _samples(store, tasks, known, without, model.n_features)
        model.preload(samples)
    prior = {}
    for task in tasks:
        # A search that does not start from the best of them cannot be compared with them.
        is_seeded = transfer_pool is not None and task.identity in known
        finals = store.finals(task)
        seconds = _seconds(store, task, finals, without) if is_seeded else []
        # A resumed search measures none of them again: what came since has no common scale.
        seconds = seconds[: n_prior.get(task.name)]
        is_proven = bool(checked(finals))
        if seconds or is_proven:
            prior[task.name] = PriorTrials(tuple(sec * 1e3 for sec in seconds), is_proven)
    others = [task for task in known.values() if _is_of_others(store, task, without)]
    n_known = sum(task.identity in names for task in others)
    families = {task.family for task in others}
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


def _relevant(store: RecordStore, family: str, tasks: Sequence[StoredTask]) -> list[StoredTask]:
    """Return a run's own tasks of a family, and the latest of the store's others."""
    own = {task.identity: task for task in tasks if task.family == family}
    latest = store.tasks(family=family, newest=_MAX_RELATED + len(own))
    others = [task for task in latest if task.identity not in own]
    return [*own.values(), *others[-_MAX_RELATED:]]


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


def _samples(
    store: RecordStore,
    tasks: Sequence[StoredTask],
    known: Mapping[Identity, StoredTask],
    without: Container[str],
    width: int,
) -> Dataset:
    """Return samples of the run's own tasks, then of others on its targets."""
    targets = {task.target for task in tasks}
    own = {task.identity for task in tasks}
    samples = Dataset()
    for task in sorted(known.values(), key=lambda task: task.identity not in own):
        if task.target in targets and len(samples) < _MAX_SAMPLES:
            sampled = store.sample(task, _SAMPLES_PER_TASK, width=width)
            trials = [t for t in sound(store.finals(task), sampled) if t.run not in without]
            for rows, seconds, errors in _arrays(trials, width):
                samples.add("/".join(task.identity), rows, seconds, errors)
    return samples


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
