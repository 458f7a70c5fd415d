from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from tvm_adaptive import AdaptiveScheduler
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.arms import Arm, Decision
from tvm_adaptive.task_scheduler.foresight import Foresight
from tvm_adaptive.values.forms import FormKey
from tvm_adaptive.values.trial import Promise


class Script:
    """A policy that plays given arms in turn."""

    def __init__(self, *decisions: tuple[int | None, str]) -> None:
        self.decisions = list(decisions)

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        return Decision(*self.decisions.pop(0))


def arm(best_ms: float = 1.0, weight: float = 1.0, *, finished: bool = False) -> Arm:
    latencies = np.array([best_ms]) if np.isfinite(best_ms) else np.array([np.nan])
    return Arm("a", weight, 1e9, latencies, 1, 1.0, finished)


def foresight(
    *decisions: tuple[int | None, str],
    families: Sequence[str] = ("x", "x", "x", "y"),
    promises: dict[int, Promise] | None = None,
    share: float = 0.25,
) -> Foresight:
    known = {k: Promise(0.1, 0.9) for k in range(4)} if promises is None else promises
    return Foresight(Script(*decisions), families, known.get, share=share)


ARMS = [arm(), arm(), arm(3.0), arm(9.0)]
RNG = np.random.default_rng(0)


def with_trials(arms: Sequence[Arm], k: int, n_trials: int = 16) -> list[Arm]:
    """Return the arms after some more trials of one, which found nothing faster."""
    latencies_ms = np.append(arms[k].latencies_ms, np.full(n_trials, np.nan))
    played = dataclasses.replace(arms[k], latencies_ms=latencies_ms)
    return [played if n == k else each for n, each in enumerate(arms)]


def play(policy: Foresight, arms: Sequence[Arm], n_slots: int) -> list[Decision]:
    """Play slots of as many trials as a decision asks for, or of 16."""
    decisions = []
    for _ in range(n_slots):
        decision = policy.choose(arms, RNG)
        assert decision.arm is not None
        arms = with_trials(arms, decision.arm, decision.n_trials or 16)
        decisions.append(decision)
    return decisions


def test_after_a_main_slot_comes_a_smaller_one_for_a_sibling() -> None:
    first, second, third = play(foresight((0, "index"), (3, "index")), ARMS, 3)
    assert (first.arm, first.reason) == (0, "index")
    # The largest gain of the family, not of all.
    assert (second.arm, second.reason, second.n_trials) == (2, "foresee", 4)
    assert (third.arm, third.reason) == (3, "index")


def test_a_singleton_has_no_sibling_and_no_foresee_slot_follows_another() -> None:
    policy = foresight((3, "index"), (0, "index"), (1, "index"))
    reasons = [decision.reason for decision in play(policy, ARMS, 4)]
    assert reasons == ["index", "index", "foresee", "index"]


def test_a_form_that_is_behind_gains_nothing_for_the_network() -> None:
    direct, winograd = FormKey("conv"), FormKey("conv", "winograd-4x4")
    slow = dataclasses.replace(arm(4.0), key=direct)
    fast = dataclasses.replace(arm(1.0), key=winograd)
    arms = [arm(), slow, fast, arm(0.5)]
    policy = foresight((0, "index"), families=("x", "x", "y", "x"))
    _, decision = play(policy, arms, 2)
    assert (decision.arm, decision.reason) == (3, "foresee")
    # Where it could catch up, it may.
    promises = {1: Promise(0.9, 0.9), 3: Promise(0.1, 0.9)}
    policy = foresight((0, "index"), families=("x", "x", "y", "x"), promises=promises)
    assert [each.arm for each in play(policy, arms, 2)] == [0, 1]


@pytest.mark.parametrize("reason", ["warm-up", "starved", "explore"])
def test_only_main_slots_are_followed(reason: str) -> None:
    policy = foresight((0, reason), (0, "index"))
    assert [decision.reason for decision in play(policy, ARMS, 2)] == [reason, "index"]


def test_the_choice_is_made_with_what_the_updated_model_promises() -> None:
    promises = {1: Promise(0.1, 0.9), 2: Promise(0.1, 0.9)}
    policy = foresight((0, "index"), promises=promises)
    policy.choose(ARMS, RNG)
    promises[1] = Promise(0.9, 0.9)
    assert policy.choose(with_trials(ARMS, 0), RNG).arm == 1


@pytest.mark.parametrize(
    "promises",
    [
        {},
        {1: Promise(0.5, 0.29), 2: Promise(0.5, -1.0)},
        {1: Promise(0.0, 0.9), 2: Promise(0.0, 0.9)},
        {1: Promise(0.5, float("nan"))},
    ],
)
def test_without_a_promise_that_can_be_believed_the_policy_decides(
    promises: dict[int, Promise],
) -> None:
    policy = foresight((0, "index"), (1, "index"), promises=promises)
    assert [decision.reason for decision in play(policy, ARMS, 2)] == ["index", "index"]
    assert policy.is_silent == (not promises)


def test_siblings_that_are_finished_or_have_no_result_are_left_out() -> None:
    arms = [arm(), arm(finished=True), arm(float("inf")), arm()]
    policy = foresight((0, "index"), (0, "index"))
    assert [decision.reason for decision in play(policy, arms, 2)] == ["index", "index"]


def test_the_end_is_the_policys() -> None:
    policy = foresight((None, "nothing-left"))
    assert policy.choose(ARMS, RNG).arm is None


@pytest.mark.parametrize(("share", "n_trials"), [(0.01, 1), (0.5, 8), (1.0, 16)])
def test_the_share_is_of_a_main_slots_trials(share: float, n_trials: int) -> None:
    _, decision = play(foresight((0, "index"), share=share), ARMS, 2)
    assert decision.n_trials == n_trials


@pytest.mark.parametrize(("n_trials", "n_asked"), [(200, 50), (8, 2), (1, 1)])
def test_a_slot_of_seconds_has_as_many_trials_as_it_had_time_for(
    n_trials: int, n_asked: int
) -> None:
    policy = foresight((0, "index"))
    policy.choose(ARMS, RNG)
    assert policy.choose(with_trials(ARMS, 0, n_trials), RNG).n_trials == n_asked


def test_trials_count_once_their_slot_is_over_and_an_empty_slot_is_not_followed() -> None:
    policy = foresight((0, "index"), (1, "index"), (3, "index"))
    policy.choose(ARMS, RNG)
    under_way = [dataclasses.replace(ARMS[0], finished=True, is_under_way=True), *ARMS[1:]]
    assert policy.choose(under_way, RNG).arm == 1
    # Of the slot of arm 1 nothing came.
    arms = with_trials(ARMS, 0, 8)
    decision = policy.choose(arms, RNG)
    assert (decision.arm, decision.reason, decision.n_trials) == (2, "foresee", 2)
    assert policy.choose(with_trials(arms, 2, 2), RNG).arm == 3


def test_the_trials_of_a_foresee_slot_count_for_no_main_slot() -> None:
    policy = foresight((0, "index"), (2, "index"))
    policy.choose(ARMS, RNG)
    under_way = [dataclasses.replace(ARMS[0], finished=True, is_under_way=True), *ARMS[1:]]
    policy.choose(under_way, RNG)
    # Both slots are over; the sibling of the first is the arm of the second.
    arms = with_trials(with_trials(ARMS, 0, 40), 2, 16)
    decision = policy.choose(arms, RNG)
    assert (decision.arm, decision.n_trials) == (2, 10)
    assert policy.choose(with_trials(arms, 2, 10), RNG).n_trials == 4


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(InvalidOptionError, match=r"a foresee slot must be in \(0, 1\]"):
        AdaptiveScheduler(foresee_share=share)
