"""The scheduler that forecasts each arm's next slot and plays the most valuable one.

Warm-up, forecast, index, retirement and a guard against starving, each from a file of
its own; this one is the order in which they are asked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler import index, retire
from tvm_adaptive.task_scheduler.arms import Arm, Decision
from tvm_adaptive.task_scheduler.forecast.belief import METHODS, forecast
from tvm_adaptive.task_scheduler.forecast.curve import CurveFamily, curve_family
from tvm_adaptive.task_scheduler.forecast.result import History
from tvm_adaptive.task_scheduler.index import EPSILON
from tvm_adaptive.task_scheduler.warmup import WarmUp
from tvm_adaptive.values.trial import FloatArray

INDICES = ("gain-per-sec", "ucb", "bayes-ucb", "ei", "epsilon-greedy", "softmax")
# Arms whose seconds are unknown (nothing charged yet) count as equally dear.
_UNKNOWN_SEC_PER_TRIAL = 1.0


class Belief(Protocol):
    """What a forecaster tells of the throughput at the end of the next slot."""

    @property
    def mean(self) -> float:
        """Mean, in the unit of the history."""

    @property
    def samples(self) -> FloatArray:
        """Draws of shape (s,), none below the incumbent."""

    @property
    def expected_drop(self) -> float:
        """Share of its latency that the task is expected to lose, in [0, 1)."""


# Of an arm's history (the incumbent is 1), the trials of the slot, and a generator.
Forecaster = Callable[[History, int, np.random.Generator], Belief]
# Peers that have become better by no more than this leave a forecast as it was.
_PEER_TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True)
class PolicyOptions:
    """What a :class:`DynaTunePolicy` can be told."""

    # the action function: ``"gain-per-sec"`` (expected end-to-end milliseconds per second of slot),
    # ``"ucb"`` (the paper's), ``"bayes-ucb"`` (posterior quantile per second), ``"ei"`` (normal
    # posterior), ``"epsilon-greedy"``, ``"softmax"``
    index: str = "gain-per-sec"
    method: str = "quadrature"  # of the forecast: ``"quadrature"``, ``"emcee"`` or ``"records"``
    family: str | CurveFamily = "log-power"  # of the forecast's curves
    slot_trials: int = 16  # trials of a slot, the horizon of the forecast
    # seconds of a slot; takes the place of ``slot_trials``, the horizon then follows from the arm's
    # own seconds per trial
    slot_sec: float | None = None
    warm_up: WarmUp = dataclasses.field(default_factory=WarmUp)
    # an arm without improvement for so many trials is retired (the paper's 200)
    patience_trials: int | None = None
    # an arm whose next slot is expected to bring less than this share of the end-to-end latency is
    # retired, if it has not improved for a while: a thousand such slots would not bring 1 %. 0
    # retires none
    retire_share: float = 1e-5
    # A live arm that has waited for this many slots per live arm gets a small slot whatever its
    # score: at the most every tenth slot goes to waiting. ``inf`` to let it wait
    starve_after: float = 10.0
    peak_gflops: float | None = None  # the target's peak; None scales by each arm's own best
    # an arm is expected to reach at most so much more, relatively, than the best throughput of any
    # arm: what the network's other tasks have reached is what this machine can do, and an arm that
    # is there has little left to gain. None expects nothing of the kind
    peer_margin: float | None = 0.05
    # C of ``"ucb"``; None takes the paper's, by the first end-to-end latency
    exploration: float | None = None
    epsilon: float = EPSILON  # of ``"epsilon-greedy"``
    temperature_ms: float | None = None  # of ``"softmax"``; None takes the mean gain

    def __post_init__(self) -> None:
        if self.index not in INDICES:
            raise InvalidOptionError(
                f"index must be one of {', '.join(INDICES)} but got {self.index!r}."
            )
        if self.method not in METHODS:
            raise InvalidOptionError(
                f"method must be one of {', '.join(METHODS)} but got {self.method!r}."
            )
        curve_family(self.family)
        if not 0.0 <= self.epsilon <= 1.0:
            raise InvalidOptionError(f"epsilon must be in [0, 1] but got {self.epsilon}.")
        if not 0.0 <= self.retire_share < 1.0:
            raise InvalidOptionError(f"retire_share must be in [0, 1) but got {self.retire_share}.")
        for name in ("slot_trials", "patience_trials"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidOptionError(f"{name} must be at least 1 but got {value}.")
        for name in (
            "slot_sec",
            "starve_after",
            "peak_gflops",
            "peer_margin",
            "exploration",
            "temperature_ms",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidOptionError(f"{name} must be above 0 but got {value}.")


DEFAULT = PolicyOptions()
# As published: whole slots until the first result, sampled curves, UCB with the
# occurrence weight, and 200 trials of patience as the only reason to leave an arm.
PAPER = PolicyOptions(
    index="ucb",
    method="emcee",
    warm_up=WarmUp(n_trials=None, give_up_trials=200, give_up_slots=200),
    patience_trials=200,
    retire_share=0.0,
    starve_after=math.inf,
    peer_margin=None,
)
PRESETS = {"default": DEFAULT, "paper": PAPER}


@dataclasses.dataclass(frozen=True)
class _Outlook:
    """The forecast of one arm, converted.

    It stays true until the arm is played again or its peers have become much better.
    """

    n_trials: int
    peer_gflops: float
    gain_ms: float
    gains_ms: FloatArray
    published_gain_ms: float
    slot_sec: float


class DynaTunePolicy:
    """Forecast, convert to end-to-end milliseconds, and play the best arm.

    One object serves one run.
    """

    def __init__(
        self, options: PolicyOptions | str = "default", forecaster: Forecaster | None = None
    ) -> None:
        self.options = resolve_options(options)
        self._forecast = forecaster or default_forecaster(self.options)
        self._outlooks: dict[int, _Outlook] = {}
        self._retired: set[int] = set()
        self._waiting = retire.Waiting()
        self._initial_ms: float | None = None

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        """Choose the arm of the next slot; see :class:`~.arms.Policy`."""
        self._waiting.observe(arms)
        retired = self._retire(self._without_hope(arms))
        live = self._live(arms)
        cold = self.options.warm_up.next_arm(arms, live)
        if cold is not None:
            trials = self.options.warm_up.trials_of(arms, cold)
            # A slot of a few trials is for a first result; the paper's is a whole one.
            few = trials is not None
            return Decision(cold, "warm-up", n_trials=trials, retired=retired, until_success=few)
        self._look_ahead(arms, live, rng)
        retired += self._retire([k for k in live if self._is_worthless(arms, k)])
        live = self._live(arms)
        if not live:
            return Decision(None, "nothing-left", retired=retired)
        scores = self._scores(arms, live)
        waiting, n_waited = self._waiting.longest(live)
        if n_waited > self.options.starve_after * len(live):
            trials = self.options.warm_up.n_trials
            arm, reason = waiting, "starved"
        else:
            trials = None
            arm, reason = self._pick(scores, rng)
        return Decision(arm, reason, trials, scores, self._unit(), retired)

    def _live(self, arms: Sequence[Arm]) -> list[int]:
        return [k for k, arm in enumerate(arms) if not arm.finished and k not in self._retired]

    def _retire(self, which: Sequence[int]) -> tuple[int, ...]:
        self._retired.update(which)
        return tuple(which)

    def _without_hope(self, arms: Sequence[Arm]) -> list[int]:
        options = self.options
        return [
            k
            for k in self._live(arms)
            if options.warm_up.is_hopeless(arms[k])
            or (
                math.isfinite(arms[k].best_ms)
                and retire.out_of_patience(arms[k], options.patience_trials)
            )
        ]

    def _is_worthless(self, arms: Sequence[Arm], k: int) -> bool:
        gain_ms = self._outlooks[k].gain_ms
        return retire.not_worth_a_slot(
            arms[k], gain_ms, retire.end_to_end_ms(arms), self.options.retire_share
        )

    def _look_ahead(
        self, arms: Sequence[Arm], live: Sequence[int], rng: np.random.Generator
    ) -> None:
        """Forecast anew the arms that were played since; the others rest as they were."""
        if self._initial_ms is None:
            self._initial_ms = retire.end_to_end_ms(arms)
        peer_gflops = max(map(best_gflops, arms), default=0.0)
        for k in live:
            known = self._outlooks.get(k)
            if (
                known is None
                or known.n_trials != arms[k].n_trials
                or known.peer_gflops * (1.0 + _PEER_TOLERANCE) < peer_gflops
            ):
                self._outlooks[k] = self._outlook(arms[k], peer_gflops, rng)

    def _outlook(self, arm: Arm, peer_gflops: float, rng: np.random.Generator) -> _Outlook:
        options = self.options
        sec_per_trial = arm.sec_per_trial
        if not sec_per_trial > 0:
            sec_per_trial = _UNKNOWN_SEC_PER_TRIAL
        if options.slot_sec is None:
            horizon = options.slot_trials
        else:
            horizon = max(1, math.floor(options.slot_sec / sec_per_trial))
        belief = self._forecast(self._history(arm, peer_gflops), horizon, rng)
        return _Outlook(
            n_trials=arm.n_trials,
            peer_gflops=peer_gflops,
            gain_ms=arm.weight * arm.best_ms * belief.expected_drop,
            gains_ms=index.gain_samples_ms(belief.samples, 1.0, arm.best_ms, arm.weight),
            published_gain_ms=index.published_gain_ms(belief.mean, 1.0, arm.best_ms, arm.weight),
            slot_sec=horizon * sec_per_trial,
        )

    def _history(self, arm: Arm, peer_gflops: float) -> History:
        """Return an arm's throughput and its limits, in multiples of the incumbent."""
        options = self.options
        own_gflops = best_gflops(arm)
        peak = expected_peak = None
        if options.peak_gflops is not None:
            # A measured throughput above the stated peak proves the statement wrong.
            peak = max(options.peak_gflops / own_gflops, 1.0)
        if options.peer_margin is not None:
            expected_peak = (1.0 + options.peer_margin) * peer_gflops / own_gflops
        return History(arm.throughput_history(), peak, expected_peak)

    def _scores(self, arms: Sequence[Arm], live: Sequence[int]) -> FloatArray:
        scores = np.full(len(arms), np.nan)
        scores[list(live)] = [self._score(self._outlooks[k], arms) for k in live]
        if self.options.index == "ucb":
            assert self._initial_ms is not None
            c = self.options.exploration or index.exploration_constant(self._initial_ms)
            counts = [arm.n_slots for arm in arms]
            scores = index.ucb(scores, counts, sum(counts), c)
            scores[[k for k in range(len(arms)) if k not in set(live)]] = np.nan
        return scores

    def _score(self, outlook: _Outlook, arms: Sequence[Arm]) -> float:
        kind = self.options.index
        if kind == "ucb":
            return outlook.published_gain_ms
        if kind == "ei":
            gains = outlook.gains_ms
            return index.expected_improvement_ms(-float(gains.mean()), float(gains.std()), 0.0)
        if kind == "bayes-ucb":
            level = index.bayes_ucb_level(sum(arm.n_slots for arm in arms))
            return index.bayes_ucb(outlook.gains_ms, level) / outlook.slot_sec
        per_sec = kind == "gain-per-sec"
        return outlook.gain_ms / outlook.slot_sec if per_sec else outlook.gain_ms

    def _pick(self, scores: FloatArray, rng: np.random.Generator) -> tuple[int, str]:
        if self.options.index == "epsilon-greedy":
            arm, by_chance = index.epsilon_greedy(scores, self.options.epsilon, rng)
            return arm, "explore" if by_chance else "index"
        if self.options.index == "softmax":
            chances = index.softmax_probabilities(scores, self.options.temperature_ms)
            return int(rng.choice(len(scores), p=chances)), "index"
        return index.argmax(scores, rng), "index"

    def _unit(self) -> str:
        return "ms/s" if self.options.index in ("gain-per-sec", "bayes-ucb") else "ms"


def best_gflops(arm: Arm) -> float:
    """Return the throughput of an arm's incumbent; 0 before the first success."""
    return float(index.throughput_gflops(arm.flop, arm.best_ms))


def resolve_options(options: PolicyOptions | str) -> PolicyOptions:
    """Return the options of a preset's name, or the options themselves."""
    if isinstance(options, PolicyOptions):
        return options
    if options not in PRESETS:
        raise InvalidOptionError(
            f"The preset must be one of {', '.join(PRESETS)} but got {options!r}."
        )
    return PRESETS[options]


def default_forecaster(options: PolicyOptions) -> Forecaster:
    """Return the package's own forecast, by ``options.method`` and ``options.family``."""

    def own(history: History, horizon: int, rng: np.random.Generator) -> Belief:
        return forecast(
            history.best,
            horizon,
            method=options.method,
            family=options.family,
            peak=history.peak,
            expected_peak=history.expected_peak,
            rng=rng,
        )

    return own
