"""What earlier runs know of a run's tasks: seeds for the search, samples for the model.

===================  =============================  ==========================
records of           seeds                          samples
===================  =============================  ==========================
the same task        measured first, as they are    yes
its family           fitted to the task's extents   yes
another target       fitted to the task's extents   no: other machines differ
another environment  measured first, as they are    no: other machines differ
===================  =============================  ==========================

An environment is a device with a version of TVM (:mod:`tvm_adaptive.workers.environment`);
what does not say where it was measured is another one's.

The best are those that play-offs proved, and the fastest that none has judged; what one
found out (wrong results, crashes) is forgotten. Nothing that was recorded is believed
without being measured again: machines are noisy, and compilers change.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence

import numpy as np

from tvm_adaptive._tvm import TuneContext
from tvm_adaptive.cost_model.dataset import CAPACITY, Dataset
from tvm_adaptive.database.metaschedule import task_of
from tvm_adaptive.database.records import Features, Identity, StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.verdicts import checked, sound, trusted
from tvm_adaptive.search_strategy.transfer import (
    KEPT_PER_TASK,
    TransferPool,
    TransferRecord,
    transfer_record_of,
)
from tvm_adaptive.task_scheduler.arms import PriorTrials
from tvm_adaptive.values.hooks import ModelHooks
from tvm_adaptive.values.trial import FloatArray

logger = logging.getLogger(__name__)

# Samples of one task that the model is given, and of all: a run's forest is grown anew
# after every batch, from so many in a fifth of a second.
_SAMPLES_PER_TASK = 64
_MAX_SAMPLES = 1500
# A store of years must not make a run's start slow.
_MAX_RELATIVES = 64


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """What was found for a run."""

    n_known: int = 0  # tasks that were tuned before on this target
    n_related: int = 0  # other tasks that have relatives in the store
    n_samples: int = 0  # samples for the model
    # what is known of the tasks themselves, by their names
    tasks: Mapping[str, PriorTrials] = dataclasses.field(default_factory=dict)
    n_left_out: int = 0  # rows of the store that are no records


def find_prior_trials(
    store: RecordStore,
    contexts: Sequence[TuneContext],
    transfer_pool: TransferPool | None,
    model: ModelHooks | None,
    *,
    without: Collection[str] = (),
) -> WarmStart:
    """Hand on what a store knows of a run's tasks."""
    tasks = [task_of(each.mod, each.target, str(each.task_name)) for each in contexts]
    mine = {task.identity: task.name for task in tasks}
    known: dict[Identity, StoredTask] = {}
    for family in dict.fromkeys(task.family for task in tasks):
        for task in _relevant(store, family, tasks):
            transfer_records = _transfer_records(trusted(store, task, KEPT_PER_TASK))
            if transfer_records:
                known[task.identity] = task
                if transfer_pool is not None:
                    name = mine.get(task.identity, str(task.identity))
                    transfer_pool.remember(family, name, transfer_records)
    width = None if model is None else model.n_features
    samples = _samples(store, tasks, known, without, width)
    if model is not None:
        model.preload(samples)
    n_known = sum(identity in mine for identity in known)
    families = {task.family for task in known.values()}
    n_of_families = sum(task.family in families for task in tasks)
    remembered = {}
    for task in tasks:
        # A search that does not begin with the best of them cannot be compared with them.
        begins_there = transfer_pool is not None and task.identity in known
        seconds = store.seconds(task, without=without) if begins_there else []
        is_proven = bool(checked(store.finals(task)))
        if seconds or is_proven:
            remembered[task.name] = PriorTrials(tuple(sec * 1e3 for sec in seconds), is_proven)
    n_related = n_of_families - n_known
    return WarmStart(n_known, n_related, len(samples), remembered, store.n_left_out)


def _relevant(store: RecordStore, family: str, tasks: Sequence[StoredTask]) -> list[StoredTask]:
    """Return a run's own tasks of a family, and the latest of the others."""
    own = {task.identity: task for task in tasks if task.family == family}
    latest = store.tasks(family=family, newest=_MAX_RELATIVES + len(own))
    others = [task for task in latest if task.identity not in own]
    return [*own.values(), *others[-_MAX_RELATIVES:]]


def _transfer_records(trials: Sequence[StoredTrial]) -> list[TransferRecord]:
    """Return what trials found; those that this version cannot read are left out."""
    found = []
    for trial in trials:
        if trial.seconds is not None:
            finding = transfer_record_of(json.loads(trial.record), trial.seconds)
            found += [] if finding is None else [finding]
    return found


def restore(store: RecordStore, contexts: Sequence[TuneContext], model: ModelHooks | None) -> int:
    """Teach a cost model what earlier sittings of the same run taught it."""
    n_samples = 0
    if model is None:
        return n_samples
    for context in contexts:
        task = task_of(context.mod, context.target, str(context.task_name))
        # More would only be read to be dropped again.
        trials = store.sample(task, CAPACITY, with_record=False)
        for rows, seconds, errors in _arrays(trials, model.n_features):
            model.restore(context, rows, seconds, errors)
            n_samples += len(seconds)
    return n_samples


def _samples(
    store: RecordStore,
    mine: Sequence[StoredTask],
    known: Mapping[Identity, StoredTask],
    without: Container[str],
    width: int | None,
) -> Dataset:
    """Return what the model is given: of the run's own tasks, then of others of its target."""
    targets = {task.target for task in mine}
    own = {task.identity for task in mine}
    samples = Dataset()
    for task in sorted(known.values(), key=lambda task: task.identity not in own):
        if task.target in targets and len(samples) < _MAX_SAMPLES:
            sampled = store.sample(task, _SAMPLES_PER_TASK, width=width)
            trials = [t for t in sound(store, task, sampled) if t.run not in without]
            for rows, seconds, errors in _arrays(trials, samples.width or width):
                samples.add("/".join(task.identity), rows, seconds, errors)
    return samples


def _arrays(
    trials: Sequence[StoredTrial], width: int | None
) -> Iterator[tuple[Features, FloatArray, FloatArray]]:
    """Yield features, seconds and errors of trials that have features; once, or not at all.

    Another version's features are another number of them; where the model does not say how
    many it takes, the commonest are right.
    """
    widths = Counter(len(trial.features) for trial in trials if trial.features is not None)
    if width is None and widths:
        ((width, _),) = widths.most_common(1)
    usable = [t for t in trials if t.features is not None and len(t.features) == width]
    if usable:
        yield (
            np.stack([trial.features for trial in usable if trial.features is not None]),
            np.array([math.nan if trial.seconds is None else trial.seconds for trial in usable]),
            np.array([math.nan if trial.error is None else trial.error for trial in usable]),
        )
