"""The fastest candidate's forms that prefetch its weights, on a product whose weights are large."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.models.prefetch.conftest import product
from tvm_adaptive import AdaptiveSearch, RFEICostModel
from tvm_adaptive._tvm import python_side
from tvm_adaptive.measure_callback.journal import NullJournal
from tvm_adaptive.models.prefetch.rewrite import HINT
from tvm_adaptive.search_strategy.schedules import key_of
from tvm_adaptive.search_strategy.sketches import Sketches
from tvm_adaptive.search_strategy.surrogate_proposer import draft_of
from tvm_adaptive.search_strategy.transfer import TransferPool
from tvm_adaptive.values.trial_log import TrialLog


class Rounds(NullJournal):
    """A journal of rounds."""

    def __init__(self) -> None:
        self.n_prefetching: list[int] = []

    def write(self, event: str, **fields: Any) -> None:
        if event == "round":
            self.n_prefetching.append(fields["n_prefetching"])


def prefetches(schedule: Any) -> bool:
    return HINT in str(schedule.trace)


@pytest.fixture
def make(make_task: Any) -> Any:
    def make(n_columns: int = 256, **options: Any) -> Any:
        journal, trial_log = Rounds(), TrialLog()
        model = RFEICostModel(n_trees=8, seed=1, n_jobs=1)
        strategy = AdaptiveSearch(
            n_samples=12, journal=journal, trial_log=trial_log, **{"prefetch": True, **options}
        )
        task = make_task(strategy, model, mod=product(n_columns), batch=8)
        task.journal, task.trial_log = journal, trial_log
        return task

    return make


def generate(task: Any) -> list[Any]:
    return [candidate.sch for candidate in task.strategy.generate_measure_candidates()]


def test_the_fastest_is_tried_with_its_weights_prefetched(make: Any) -> None:
    task = make()
    first = task.round()
    assert not any(prefetches(candidate.sch) for candidate in first)
    best = task.proposer._elites[0][1]
    forms = [schedule for schedule in generate(task) if prefetches(schedule)]
    assert len(forms) == 2
    assert task.journal.n_prefetching == [0, 2]
    sent = task.proposer.candidates.sent
    assert [sent[key_of(form)] for form in forms] == [best, best]
    for form in forms:
        features = task.trial_log.get(key_of(form)).features
        assert features is not None
        assert np.isfinite(features).all()


def test_a_form_that_is_faster_takes_the_place_of_its_program(make: Any) -> None:
    task = make()
    task.round()
    seconds, best = task.proposer._elites[0]
    forms = [schedule for schedule in generate(task) if prefetches(schedule)]
    task.proposer.tell(forms, [0.9 * seconds, 1.1 * seconds])
    elites = task.proposer._elites
    assert elites[0] == (0.9 * seconds, best)
    assert [point for _, point in elites].count(best) == 1
    # What is only the same program in another form is not tried again.
    assert not any(map(prefetches, generate(task)))


def test_a_program_that_is_hardly_faster_is_not_tried(make: Any) -> None:
    task = make()
    task.round()
    seconds, _ = task.proposer._elites[0]
    # Not every schedule reads its weights in panels.
    forms_of = task.proposer.candidates.sketches.prefetching
    plain = [each for each in generate(task) if not prefetches(each) and forms_of(each)]
    task.proposer.tell(plain[:1], [0.97 * seconds])
    assert not any(map(prefetches, generate(task)))
    task.proposer.tell(plain[1:2], [0.9 * seconds])
    assert sum(map(prefetches, generate(task))) == 2
    assert task.journal.n_prefetching == [0, 2, 0, 2]


def test_what_another_process_sent_is_made_again(make: Any) -> None:
    there, here = make(), make()
    there.round()
    sent = generate(there)
    keys = [key_of(schedule) for schedule in sent]
    again = python_side(here.strategy).take_over(python_side(there.strategy).carry(), keys)
    assert sum(prefetches(schedule) for schedule in again.values()) == 2
    assert {key: prefetches(again[key]) for key in again} == {
        key: prefetches(schedule) for key, schedule in zip(keys, sent, strict=True) if key in again
    }
    # The state says that they were tried.
    assert here.proposer._prefetched == there.proposer._prefetched


def test_a_task_with_far_weights_begins_with_a_form_of_its_first_draft(make: Any) -> None:
    task = make(2048)  # 4 MiB
    assert task.proposer.candidates.sketches.has_far_weights
    python_side(task.strategy).limit_next_batch(4)
    *drafts, form = generate(task)
    assert [prefetches(draft) for draft in drafts] == [False] * 3
    assert prefetches(form)
    sent = task.proposer.candidates.sent
    assert sent[key_of(form)] == sent[key_of(drafts[0])]
    assert task.journal.n_prefetching == [1]
    # If the second one is the fastest, its forms follow, and else none.
    for fastest in (1, 0):
        task.proposer.tell(drafts[:2], [1e-3 + 1e-4 * (i != fastest) for i in range(2)])
        assert any(map(prefetches, generate(task))) == (fastest == 1)


@pytest.mark.parametrize(
    ("dtype", "is_far"), [("float32", True), ("float16", True), ("int8", False)]
)
def test_weights_are_far_by_their_bytes(make_context: Any, dtype: str, is_far: bool) -> None:
    context = make_context("GMM", mod=product(2048, dtype=dtype))  # 2^20 numbers
    assert Sketches(context, []).has_far_weights == is_far


def test_drafts_of_tasks_with_far_weights_prefetch(make_context: Any) -> None:
    for n_columns, far in ((256, False), (2048, True)):
        context = make_context("GMM", mod=product(n_columns))
        rng = np.random.default_rng(0)
        draft = draft_of(context, rng, TransferPool())
        assert draft is not None
        assert prefetches(draft) == far
        plain = draft_of(context, np.random.default_rng(0), TransferPool(), prefetch=False)
        assert plain is not None
        assert not prefetches(plain)


@pytest.mark.parametrize(("n_columns", "options"), [(64, {}), (256, {"prefetch": False})])
def test_small_weights_are_left_alone(make: Any, n_columns: int, options: dict[str, bool]) -> None:
    task = make(n_columns, **options)
    for _ in range(3):
        assert not any(prefetches(candidate.sch) for candidate in task.round())
    assert task.journal.n_prefetching == [0, 0, 0]
