"""What samples of relatives are worth to a task that has some of its own.

    python -m benchmarks.starter.fading runs/starter --threads 2

Each task of a making is left out in turn: the forest learns a share of the samples of its
relatives as starter records, and some of the task's own. The mean rank correlation of the
forecasts of its other samples is printed, by own samples and share. It decides after how many
samples of this machine half of another machine's are learned (`cost_model/surrogate.py`).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.starter.__main__ import STORE, target_of
from tvm_adaptive.cli.arguments import parse_count
from tvm_adaptive.cost_model.dataset import Dataset
from tvm_adaptive.cost_model.surrogate import Surrogate, SurrogateOptions, rank_correlation
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.values.hooks import Rows
from tvm_adaptive.values.trial import FloatArray
from tvm_adaptive.workers.environment import Environment

Samples = dict[str, dict[str, tuple[Rows, FloatArray]]]  # by family and task

OWN = (0, 4, 8, 16, 32)
SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
PER_TASK = 64
# Of fewer forecasts a rank correlation is mostly noise.
MIN_TEST = 12


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="what relatives' samples are worth")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="folder of a making")
    parser.add_argument("--threads", type=parse_count, default=2)
    parser.add_argument("--mcpu", default="native")
    options = parser.parse_args(arguments)
    target = resolve_target(target_of(options))
    with RecordStore(options.out / STORE, Environment.current(target)) as store:
        samples = samples_of(store)
    print(f"| own samples | {' | '.join(f'{share:.0%} of others' for share in SHARES)} | tasks |")
    print(f"|---|{'---|' * (len(SHARES) + 1)}")
    for n_own in OWN:
        rows = [
            [quality(family, name, n_own, share) for share in SHARES]
            for family in samples.values()
            for name, (_, seconds) in family.items()
            if len(family) > 1 and len(seconds) >= n_own + MIN_TEST
        ]
        if rows:
            # Without any sample there is no forecast.
            means = [np.mean(column) for column in np.nan_to_num(rows).T]
            print(f"| {n_own} | {' | '.join(f'{each:.3f}' for each in means)} | {len(rows)} |")
    return 0


def samples_of(store: RecordStore) -> Samples:
    """Return the successes of each task that have features."""
    found: Samples = {}
    for task in store.tasks():
        trials = store.sample(task, PER_TASK, with_record=False)
        usable = [
            (each.features, each.seconds)
            for each in trials
            if each.features is not None and each.seconds is not None
        ]
        if usable:
            rows, seconds = zip(*usable, strict=True)
            samples = (np.stack(rows), np.array(seconds))
            found.setdefault(task.family, {})[task.workload_key] = samples
    return found


def quality(
    family: dict[str, tuple[Rows, FloatArray]], name: str, n_own: int, share: float
) -> float:
    """Return the rank correlation for one task, of which ``n_own`` samples are learned."""
    others = Dataset()
    for other, (rows, seconds) in family.items():
        if other != name:
            others.add(other, rows, seconds)
    others = others.with_share(share, lambda _: True)
    rows, seconds = family[name]
    order = np.random.default_rng(0).permutation(len(seconds))
    own, unseen = order[:n_own], order[n_own:]
    model = Surrogate(SurrogateOptions(acquisition="mean"), seed=0)
    model.preload(others)
    if n_own:
        model.add(name, rows[own], seconds[own])
    model.refit_if_due()
    scores = model.scores(name, rows[unseen])
    return math.nan if scores is None else rank_correlation(scores, -seconds[unseen])


if __name__ == "__main__":
    sys.exit(main())
