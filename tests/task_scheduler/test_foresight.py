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
    return Foresight(Script(*decisions), families, known.get, slot_trials=16, share=share)


ARMS = [arm(), arm(), arm(3.0), arm(9.0)]
RNG = np.random.default_rng(0)


def test_after_a_main_slot_comes_a_smaller_one_for_a_sibling() -> None:
    policy = foresight((0, "index"), (3, "index"))
    first, second, third = (policy.choose(ARMS, RNG) for _ in range(3))
    assert (first.arm, first.reason) == (0, "index")
    # The largest gain of the family, not of all.
    assert (second.arm, second.reason, second.n_trials) == (2, "foresee", 4)
    assert (third.arm, third.reason) == (3, "index")


def test_a_singleton_has_no_sibling_and_no_foresee_slot_follows_another() -> None:
    policy = foresight((3, "index"), (0, "index"), (1, "index"))
    reasons = [policy.choose(ARMS, RNG).reason for _ in range(4)]
    assert reasons == ["index", "index", "foresee", "index"]


def test_a_form_that_is_behind_gains_nothing_for_the_network() -> None:
    direct, winograd = FormKey("conv"), FormKey("conv", "winograd-4x4")
    slow = dataclasses.replace(arm(4.0), key=direct)
    fast = dataclasses.replace(arm(1.0), key=winograd)
    arms = [arm(), slow, fast, arm(0.5)]
    policy = foresight((0, "index"), families=("x", "x", "y", "x"))
    policy.choose(arms, RNG)
    decision = policy.choose(arms, RNG)
    assert (decision.arm, decision.reason) == (3, "foresee")
    # Where it could catch up, it may.
    promises = {1: Promise(0.9, 0.9), 3: Promise(0.1, 0.9)}
    policy = foresight((0, "index"), families=("x", "x", "y", "x"), promises=promises)
    policy.choose(arms, RNG)
    assert policy.choose(arms, RNG).arm == 1


@pytest.mark.parametrize("reason", ["warm-up", "starved", "explore"])
def test_only_main_slots_are_followed(reason: str) -> None:
    policy = foresight((0, reason), (0, "index"))
    assert [policy.choose(ARMS, RNG).reason for _ in range(2)] == [reason, "index"]


def test_the_choice_is_made_with_what_the_updated_model_promises() -> None:
    promises = {1: Promise(0.1, 0.9), 2: Promise(0.1, 0.9)}
    policy = foresight((0, "index"), promises=promises)
    policy.choose(ARMS, RNG)
    promises[1] = Promise(0.9, 0.9)
    assert policy.choose(ARMS, RNG).arm == 1


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
    assert [policy.choose(ARMS, RNG).reason for _ in range(2)] == ["index", "index"]


def test_siblings_that_are_finished_or_have_no_result_are_left_out() -> None:
    arms = [arm(), arm(finished=True), arm(float("inf")), arm()]
    policy = foresight((0, "index"), (0, "index"))
    assert [policy.choose(arms, RNG).reason for _ in range(2)] == ["index", "index"]


def test_the_end_is_the_policys() -> None:
    policy = foresight((None, "nothing-left"))
    assert policy.choose(ARMS, RNG).arm is None


@pytest.mark.parametrize(("share", "n_trials"), [(0.01, 1), (0.5, 8), (1.0, 16)])
def test_the_share_is_of_a_main_slots_trials(share: float, n_trials: int) -> None:
    policy = foresight((0, "index"), share=share)
    policy.choose(ARMS, RNG)
    assert policy.choose(ARMS, RNG).n_trials == n_trials


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(InvalidOptionError, match=r"a foresee slot must be in \(0, 1\]"):
        AdaptiveScheduler(foresee_share=share)
