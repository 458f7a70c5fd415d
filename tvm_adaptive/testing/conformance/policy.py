"""Rules for every policy of a task scheduler."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.arms import Arm, Decision, Policy
from tvm_adaptive.task_scheduler.slot_queue import check_decision
from tvm_adaptive.testing.conformance.raising import must_not_raise
from tvm_adaptive.testing.recording import Recording
from tvm_adaptive.testing.replay import ReplayRun, replay
from tvm_adaptive.testing.synthetic import SyntheticArm, record_arms

MakePolicy = Callable[[], Policy]  # a fresh one each time

_ARM = SyntheticArm("good", start_ms=5.0, floor_ms=1.0, tau_trials=100.0, flop=1e9, spread=0.2)
_BATCH = 8
_N_ARMS = 4
# Enough for a policy that plays each arm now and then to do so.
_N_TRIALS = 50 * _BATCH
# With a chance of 1 in 20 slots for any arm (epsilon-greedy's), one of four is missed
# for so many slots only once in some 10^4 runs.
_PATIENCE_SLOTS = 150
# The paper's patience of 200 trials, in batches, and a few more.
_STALL_SLOTS = 30
# Later results change the order, and when a policy sees nothing left to gain; a policy that
# takes an arm under way for ended gives each arm one slot.
_SHARE_UNDER_WAY = 0.5
# Per arm; fifty full batches are recorded, so a policy that needs more slots takes far too
# small ones.
_MANY_SLOTS = 1000


@dataclasses.dataclass(frozen=True)
class PolicyReport:
    """The cost of a policy that passed all checks: no criterion, since machines differ."""

    median_decision_sec: float  # on this machine, with four arms
    max_decision_sec: float
    n_decisions: int


def check_policy(make_policy: MakePolicy, *, seed: int = 0) -> PolicyReport:
    """Run all checks of a policy, in replays of made-up recordings.

    Parameters
    ----------
    make_policy : callable
        Returns a fresh policy each time.
    seed : int, default 0
        Of the recordings and of the generator that the policy gets.

    Raises
    ------
    AssertionError
        With the rule, and what the policy did.
    """
    # Live arms, well-formed decisions, and histories that are left alone.
    _replayed(make_policy, _arms_alike(seed, failing=0.2), seed)
    check_single_arm(make_policy, seed)
    check_failing_arms(make_policy, seed)
    check_nothing_left(make_policy, seed)
    check_same_seed(make_policy, seed)
    run = check_no_arm_starves(make_policy, seed)
    check_arms_under_way(make_policy, seed, len(run.choices))
    return PolicyReport(
        median_decision_sec=float(np.median(run.decide_sec)),
        max_decision_sec=float(run.decide_sec.max()),
        n_decisions=len(run.decide_sec),
    )


def check_single_arm(make_policy: MakePolicy, seed: int) -> None:
    """Tune a network of one task."""
    run = _replayed(make_policy, _recorded(_ARM, seed=seed), seed)
    assert len(run.choices) > 0, "with one arm, the policy ended the run without playing it"


def check_failing_arms(make_policy: MakePolicy, seed: int) -> None:
    """Require that arms that always fail stop neither the run nor other arms."""
    broken = dataclasses.replace(_ARM, name="broken", failing=1.0, flop=1e12)
    run = _replayed(make_policy, _recorded(broken, _ARM, seed=seed), seed)
    assert 1 in run.choices[:_STALL_SLOTS], (
        f"an arm that always fails kept the policy from the other one for {_STALL_SLOTS} slots"
    )
    assert run.latency_ms[-1] < run.latency_ms[0], "the arm that can be tuned was not"
    _replayed(make_policy, _recorded(broken, seed=seed), seed)


def check_nothing_left(make_policy: MakePolicy, seed: int) -> None:
    """Require that a run ends with all arms finished, also before any was played."""
    arms = [Arm(f"arm{k}", 1.0, 1e9, np.empty(0), 0, 0.0, finished=True) for k in range(_N_ARMS)]
    _Watched(make_policy()).choose(arms, np.random.default_rng(seed))


def check_same_seed(make_policy: MakePolicy, seed: int) -> None:
    """Require the same choices from the same generator, the only source of randomness."""
    recording = _arms_alike(seed)
    first, second = (_replayed(make_policy, recording, seed) for _ in range(2))
    assert first.choices == second.choices, "the same seed led to different choices"


def check_no_arm_starves(make_policy: MakePolicy, seed: int) -> ReplayRun:
    """Require that each of several similar arms is played until it is finished."""
    recording = _arms_alike(seed)
    watched = _Watched(make_policy())
    run = replay(recording, watched, seed)
    for k, longest in watched.longest_wait.items():
        assert longest <= _PATIENCE_SLOTS, (
            f"arm {k} was neither finished nor retired and waited for {longest} slots"
        )
    return run


def check_arms_under_way(make_policy: MakePolicy, seed: int, n_slots: int) -> None:
    """Require that an arm under way, which is finished for a slot, is played again.

    A run with results at once took ``n_slots``.
    """
    run = replay(_arms_alike(seed), _Delayed(_Watched(make_policy())), seed)
    assert len(run.choices) >= n_slots * _SHARE_UNDER_WAY, (
        f"the policy gave {n_slots} slots where results came at once, but {len(run.choices)} "
        "where an arm was under way until after the next decision: it is finished for as long "
        "only (Arm.is_under_way)"
    )


class _Delayed:
    """A policy that sees the results of its last slot after its next decision."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._under_way: int | None = None
        self._seen: Sequence[Arm] = ()  # with the results that the policy knows

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        """Ask the policy, and once more with all results if it sees nothing to play."""
        shown = list(arms)
        if self._under_way is not None:
            shown[self._under_way] = self._without_results(arms[self._under_way])
        decision = self.policy.choose(shown, rng)
        if decision.arm is None and self._under_way is not None:
            retired = decision.retired
            shown = [
                dataclasses.replace(arm, finished=arm.finished or k in retired)
                for k, arm in enumerate(arms)
            ]
            decision = self.policy.choose(shown, rng)
            decision = dataclasses.replace(decision, retired=(*retired, *decision.retired))
        self._under_way, self._seen = decision.arm, shown
        return decision

    def _without_results(self, arm: Arm) -> Arm:
        assert self._under_way is not None
        before = self._seen[self._under_way]
        return dataclasses.replace(
            arm,
            latencies_ms=before.latencies_ms,
            spent_sec=before.spent_sec,
            finished=True,
            is_under_way=True,
        )


class _Watched:
    """A policy whose decisions are checked and whose arms are read-only."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.n_decisions = 0
        self.longest_wait: Counter[int] = Counter()  # in slots, by arm
        self._waits: Counter[int] = Counter()

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        """Call the policy and check its decision."""
        for arm in arms:
            arm.latencies_ms.flags.writeable = False
        n_left = sum(not arm.finished for arm in arms)
        with must_not_raise(f"choose() with {n_left} arms left"):
            decision = self.policy.choose(arms, rng)
        self.n_decisions += 1
        assert isinstance(decision, Decision), f"expected a Decision but got {decision!r}"
        try:
            check_decision(decision, arms)
        except InvalidOptionError as error:
            raise AssertionError(str(error)) from error
        limit = _MANY_SLOTS * len(arms)
        assert self.n_decisions < limit, f"the policy had not ended the run after {limit} slots"
        self._count_waits(arms, decision)
        return decision

    def _count_waits(self, arms: Sequence[Arm], decision: Decision) -> None:
        if decision.arm is None:
            playable = {k for k, arm in enumerate(arms) if not arm.finished}
            missed = [k for k in playable - set(decision.retired) if arms[k].n_slots == 0]
            assert not missed, f"the policy ended the run before arms {missed} were played"
            return
        for k, arm in enumerate(arms):
            waits = not arm.finished and k not in decision.retired and k != decision.arm
            self._waits[k] = self._waits[k] + 1 if waits else 0
            self.longest_wait[k] = max(self.longest_wait[k], self._waits[k])


def _replayed(make_policy: MakePolicy, recording: Recording, seed: int) -> ReplayRun:
    return replay(recording, _Watched(make_policy()), seed)


def _arms_alike(seed: int, failing: float = 0.0) -> Recording:
    arm = functools.partial(dataclasses.replace, _ARM, failing=failing)
    arms = [arm(name=f"arm{k}", start_ms=4.0 + k, flop=1e9 * (1 + k)) for k in range(_N_ARMS)]
    return _recorded(*arms, seed=seed)


def _recorded(*arms: SyntheticArm, seed: int) -> Recording:
    return record_arms(arms, n_trials=_N_TRIALS, batch=_BATCH, seed=seed)
