"""The scheduler that forecasts each arm's next slot and plays the most valuable one."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from tvm_adaptive.errors import check_at_least, check_choices, check_positive, check_share
from tvm_adaptive.task_scheduler import index, stages
from tvm_adaptive.task_scheduler.arms import Arm, Decision
from tvm_adaptive.task_scheduler.forecast.belief import METHODS, forecast_history
from tvm_adaptive.task_scheduler.forecast.curve import LOG_POWER, CurveFamily
from tvm_adaptive.task_scheduler.forecast.result import Forecast, ThroughputHistory
from tvm_adaptive.task_scheduler.forms import FormArms
from tvm_adaptive.task_scheduler.index import EPSILON
from tvm_adaptive.task_scheduler.stages import WarmUp
from tvm_adaptive.values import roofline
from tvm_adaptive.values.trial import FloatArray

INDICES = ("gain-per-sec", "ucb", "epsilon-greedy", "softmax")
# Arms whose seconds are unknown (nothing charged yet) count as equally expensive.
_UNKNOWN_SEC_PER_TRIAL = 1.0
# Peers that have become better by no more than this leave a forecast as it was.
_PEER_TOLERANCE = 0.05

# Of an arm's history (the incumbent is 1), the trials of the slot, and a generator.
Forecaster = Callable[[ThroughputHistory, int, np.random.Generator], Forecast]


@dataclasses.dataclass(frozen=True)
class PolicyOptions:
    """Options of a :class:`DynaTunePolicy`."""

    # the action function: ``"gain-per-sec"`` (expected end-to-end milliseconds per second of
    # slot), ``"ucb"`` (the paper's), ``"epsilon-greedy"`` or ``"softmax"``
    index: str = "gain-per-sec"
    method: str = "quadrature"  # of the forecast: ``"quadrature"``, ``"emcee"`` or ``"records"``
    family: CurveFamily = LOG_POWER  # of the forecast's curves
    slot_trials: int = 16  # trials of a slot, the horizon of the forecast
    # seconds of a slot instead: the horizon then follows from the arm's own seconds per trial
    slot_sec: float | None = None
    warm_up: WarmUp = dataclasses.field(default_factory=WarmUp)
    # an arm without improvement for so many trials is retired (the paper's 200)
    patience_trials: int | None = None
    # an arm whose next slot is expected to save less than this share of the end-to-end latency
    # is postponed if it has not improved for a while: a thousand such slots would not save 1 %.
    # When the others have become so fast that its share is larger, it is played again. The run
    # ends when all are postponed or retired. 0 postpones none
    postpone_share: float = 1e-5
    # A live arm that has waited for this many slots per live arm gets a small slot whatever its
    # score: at most every tenth slot goes to waiting arms. ``inf`` turns it off
    starve_after: float = 10.0
    # no arm is expected to exceed the second-best throughput of the others, or its own if that
    # is higher, by more than this share: they show what the machine can do, and the best of
    # them may have a wrong count of operations. Without a limit for those that are above, the
    # replay of recorded tunings takes 1.23 x as long to within 5 %; None is for all without
    peer_margin: float | None = 0.05
    epsilon: float = EPSILON  # of ``"epsilon-greedy"``

    def __post_init__(self) -> None:
        check_choices("index", self.index, INDICES)
        check_choices("method", self.method, METHODS)
        check_share("epsilon", self.epsilon, "[0, 1]")
        check_share("postpone_share", self.postpone_share)
        check_at_least("slot_trials", self.slot_trials, 1)
        check_at_least("patience_trials", self.patience_trials, 1)
        check_positive("slot_sec", self.slot_sec)
        check_positive("starve_after", self.starve_after)
        check_positive("peer_margin", self.peer_margin)

    @property
    def is_per_sec(self) -> bool:
        """Whether scores are milliseconds per second of slot, not milliseconds."""
        return self.index == "gain-per-sec"


DEFAULT = PolicyOptions()
# As published: whole slots until the first result, sampled curves, UCB with the
# occurrence weight, and 200 trials of patience as the only reason to leave an arm.
PAPER = PolicyOptions(
    index="ucb",
    method="emcee",
    warm_up=WarmUp(n_trials=None, give_up_trials=200, give_up_slots=200),
    patience_trials=200,
    postpone_share=0.0,
    starve_after=math.inf,
    peer_margin=None,
)
PRESETS = {"default": DEFAULT, "paper": PAPER}


@dataclasses.dataclass(frozen=True)
class _Outlook:
    """The forecast of one arm in milliseconds, until it is played or its peers improve much."""

    n_slots: int
    peer_rate: float
    gain_ms: float
    published_gain_ms: float
    slot_sec: float


class DynaTunePolicy:
    """Forecast each arm, convert to end-to-end milliseconds, and play the best arm.

    One object serves one run.
    """

    def __init__(
        self, options: PolicyOptions | str = "default", forecaster: Forecaster | None = None
    ) -> None:
        if isinstance(options, str):
            check_choices("The preset", options, PRESETS)
            options = PRESETS[options]
        self.options = options
        self._forecast = forecaster or functools.partial(
            forecast_history, method=options.method, family=options.family
        )
        self._outlooks: dict[int, _Outlook] = {}
        self._waiting = stages.Starvation()

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        """Choose the arm of the next slot; see :class:`~.arms.Policy`."""
        self._waiting.observe(arms)
        options, warm_up = self.options, self.options.warm_up
        patience = options.patience_trials
        live = [k for k, arm in enumerate(arms) if not arm.finished]
        retired = tuple(k for k in live if stages.is_spent(arms[k], warm_up, patience))
        live = [k for k in live if k not in retired]
        forms = FormArms(
            [
                dataclasses.replace(arm, finished=True) if k in retired else arm
                for k, arm in enumerate(arms)
            ]
        )
        for group in (forms.first(live), forms.begun(live)):
            cold = warm_up.next_arm(arms, group)
            if cold is not None:
                return self._warmed_up(arms, cold, retired)
        openings = forms.openings(live, warm_up.n_trials or options.slot_trials, _mean_sec(arms))
        live = [k for k in live if stages.has_result(arms[k])]
        self._update_outlooks(arms, live, rng)
        gains_ms = {k: self._outlooks[k].gain_ms for k in live}
        worth_ms = forms.worth(gains_ms)
        total_ms, share = stages.end_to_end_ms(arms), options.postpone_share
        live = [k for k in live if not stages.is_postponed(arms[k], worth_ms[k], total_ms, share)]
        if not live and not openings:
            return Decision(None, "nothing-left", retired=retired)
        scores = self._scores(arms, live)
        for k in live:
            if worth_ms[k] < gains_ms[k]:
                scores[k] *= worth_ms[k] / gains_ms[k]
        for k, (gain_ms, seconds) in openings.items():
            scores[k] = gain_ms / seconds if options.is_per_sec else gain_ms
        waiting = [k for k in live if worth_ms[k] > 0.0] or live
        arm, n_waited = self._waiting.longest(waiting) if waiting else (-1, 0)
        if n_waited > options.starve_after * len(live):
            reason, trials = "starved", warm_up.n_trials
        else:
            (arm, reason), trials = self._pick(scores, rng), None
        if arm in openings:
            return self._warmed_up(arms, arm, retired)
        unit = "ms/s" if options.is_per_sec else "ms"
        return Decision(arm, reason, trials, scores, unit, retired)

    def _warmed_up(self, arms: Sequence[Arm], k: int, retired: tuple[int, ...]) -> Decision:
        """Return the decision for an arm without a result."""
        trials = self.options.warm_up.trials_of(arms, k)
        # A slot of a few trials is for a first result; the paper's is a whole one.
        few = trials is not None
        return Decision(k, "warm-up", n_trials=trials, retired=retired, until_success=few)

    def _update_outlooks(
        self, arms: Sequence[Arm], live: Sequence[int], rng: np.random.Generator
    ) -> None:
        """Forecast the arms that were played, or whose peers have become much better."""
        peer_rates = [0.0] * len(arms)  # where forecasts do not depend on them
        if self.options.peer_margin is not None:
            peer_rates = second_best_rates([best_rate(arm) for arm in arms])
        for k in live:
            known = self._outlooks.get(k)
            if (
                known is None
                or known.n_slots != arms[k].n_slots
                or known.peer_rate * (1.0 + _PEER_TOLERANCE) < peer_rates[k]
            ):
                self._outlooks[k] = self._outlook(arms[k], peer_rates[k], rng)

    def _outlook(self, arm: Arm, peer_rate: float, rng: np.random.Generator) -> _Outlook:
        options = self.options
        sec_per_trial = arm.sec_per_trial if arm.sec_per_trial > 0 else _UNKNOWN_SEC_PER_TRIAL
        horizon = options.slot_trials
        if options.slot_sec is not None:
            horizon = max(1, math.floor(options.slot_sec / sec_per_trial))
        expected_peak = None
        if options.peer_margin is not None:
            lead = max(1.0, peer_rate / best_rate(arm))
            expected_peak = (1.0 + options.peer_margin) * lead
        history = ThroughputHistory(arm.throughput_history(), expected_peak=expected_peak)
        belief = self._forecast(history, horizon, rng)
        return _Outlook(
            n_slots=arm.n_slots,
            peer_rate=peer_rate,
            gain_ms=arm.share_ms * belief.expected_drop,
            published_gain_ms=index.published_gain_ms(belief.mean, 1.0, arm.best_ms, arm.weight),
            slot_sec=horizon * sec_per_trial,
        )

    def _scores(self, arms: Sequence[Arm], live: Sequence[int]) -> FloatArray:
        scores = np.full(len(arms), np.nan)
        n_slots = [arm.n_slots for arm in arms]
        total = sum(n_slots)
        scores[live] = [self._score(self._outlooks[k]) for k in live]
        if self.options.index == "ucb":
            first = [_after(arm, self.options.slot_trials) for arm in arms]
            c = index.exploration_constant(stages.end_to_end_ms(first))
            bounds = index.ucb(scores, n_slots, total, c)
            scores = np.where(np.isin(np.arange(len(arms)), live), bounds, np.nan)
        return scores

    def _score(self, outlook: _Outlook) -> float:
        if self.options.index == "ucb":
            return outlook.published_gain_ms
        return outlook.gain_ms / outlook.slot_sec if self.options.is_per_sec else outlook.gain_ms

    def _pick(self, scores: FloatArray, rng: np.random.Generator) -> tuple[int, str]:
        if self.options.index == "epsilon-greedy":
            arm, by_chance = index.epsilon_greedy(scores, self.options.epsilon, rng)
            return arm, "explore" if by_chance else "index"
        if self.options.index == "softmax":
            return int(rng.choice(len(scores), p=index.softmax_probabilities(scores))), "index"
        return index.argmax(scores, rng), "index"


def _mean_sec(arms: Sequence[Arm]) -> float:
    """Return the mean seconds per trial of all arms."""
    n_trials = sum(arm.n_trials for arm in arms)
    spent_sec = math.fsum(arm.spent_sec for arm in arms)
    return spent_sec / n_trials if n_trials and spent_sec else _UNKNOWN_SEC_PER_TRIAL


def _after(arm: Arm, n_trials: int) -> Arm:
    """Return the arm as it was after its first trials, also in a run that was resumed."""
    return dataclasses.replace(arm, latencies_ms=arm.latencies_ms[:n_trials])


def second_best_rates(rates: Sequence[float]) -> list[float]:
    """Return the second-best throughput of each arm's peers; 0 with fewer than two."""
    order = sorted(range(len(rates)), key=lambda k: -rates[k])
    # Of the best two, either one leaves the other and the third.
    third = rates[order[2]] if len(rates) > 2 else 0.0
    return [third if k in order[:2] else rates[order[1]] for k in range(len(rates))]


def best_rate(arm: Arm) -> float:
    """Return the work per millisecond of an arm's incumbent; 0 before the first success.

    Bytes are work, too: a copy of few operations is not slow.
    """
    return roofline.work(arm.flop, arm.n_bytes) / arm.best_ms
