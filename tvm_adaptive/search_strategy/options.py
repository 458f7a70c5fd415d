"""The options of the adaptive search, and their rules."""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm_adaptive.errors import check_at_least, check_choices, check_share
from tvm_adaptive.search_strategy.exploration import N_PLANS

_CHOICES = {"proposer": ("surrogate", "evolution"), "diversity": ("none", "knobs", "medoids")}
_LEAST = {
    "population_size": 1,
    # The native search has no other end, and takes a space without samples for an empty one.
    "genetic_num_iters": 0,
    "init_min_unmeasured": 1,
    "n_samples": 1,
    "n_initial": 0,
    "n_analytical": 0,
    "n_plans": 1,
    "max_fail_count": 1,
    # It tries once more than that: without a try there is no schedule.
    "genetic_max_fail_count": 0,
}
_OF_EVOLUTION = (
    "population_size",
    "genetic_num_iters",
    "init_measured_ratio",
    "init_min_unmeasured",
    "max_fail_count",
    "genetic_mutate_prob",
    "genetic_max_fail_count",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Keyword parameters of :class:`~tvm_adaptive.AdaptiveSearch`.

    Attributes
    ----------
    proposer : {"surrogate", "evolution"}, default "surrogate"
        ``"surrogate"`` searches the decisions that sketches leave open on a forest that
        learns, round by round, the cost model's scores of programs, and so makes some
        hundred programs per round; ``"evolution"`` is MetaSchedule's own, which makes a
        thousand and serves any cost model that cannot score features alone.
    n_samples : int, default 24
        Random candidates of a round of ``"surrogate"``, which compete with those of
        earlier rounds. At least one and a half per candidate of a batch.
    population_size : int, default 256
        Schedules per generation of the evolution; half of TVM's.
    genetic_num_iters : int, default 3
        Generations per round of the evolution.
    init_measured_ratio : float, default 0.2
        Share of the first generation that are the best measured schedules.
    init_min_unmeasured : int, default 50
        Fewer random schedules than this and the evolution ends: its space is exhausted.
    max_fail_count : int, default 5
        Rounds of sampling in a row without a valid schedule before it gives up.
    genetic_mutate_prob : float, default 0.85
        Probability that a schedule of the next generation is a variation, in [0, 1].
    genetic_max_fail_count : int, default 10
        Further tries to find a valid variation, after which a schedule stays as it is.
    epsilon : float or None, default None
        Fixed share of random candidates in [0, 1]; None lets the posterior decide.
    n_initial : int, default 16
        Trials of a task before its candidates are searched for. Until then half of a batch
        is random, and half are those of some 25 random schedules that the model, which
        may know other tasks, prefers; a fixed epsilon stays as it is.
    n_analytical : int, default 8
        Candidates of ``"surrogate"`` that a task's first batch is chosen from, beside seeds:
        those that a model of the processor prefers. 0 begins with random ones. For CPUs.
    prefetch : bool, default False
        Whether ``"surrogate"`` also tries the fastest candidate with its weights prefetched,
        where they are large. See :mod:`tvm_adaptive.models.prefetch`. For CPUs, and for code
        that the builder ``"persistent"`` and :func:`~tvm_adaptive.tune` compile: others do not
        see the difference.
    n_plans : int, default 20
        Random plans that the posterior's standard deviation is averaged over.
    diversity : {"none", "knobs", "medoids"}, default "medoids"
        ``"knobs"`` trades score against unseen knob values (AutoTVM's objective with
        normalised scores), ``"medoids"`` takes the best of each k-means cluster
        (Chameleon).

    Raises
    ------
    InvalidOptionError
        When an option is out of its range.
    """

    proposer: str = "surrogate"
    n_samples: int = 24
    population_size: int = 256
    genetic_num_iters: int = 3
    init_measured_ratio: float = 0.2
    init_min_unmeasured: int = 50
    max_fail_count: int = 5
    genetic_mutate_prob: float = 0.85
    genetic_max_fail_count: int = 10
    epsilon: float | None = None
    n_initial: int = 16
    n_analytical: int = 8
    prefetch: bool = False
    n_plans: int = N_PLANS
    diversity: str = "medoids"

    def __post_init__(self) -> None:
        check_share("epsilon", self.epsilon, "[0, 1]")
        for name, least in _LEAST.items():
            check_at_least(name, getattr(self, name), least)
        for name, choices in _CHOICES.items():
            check_choices(name, getattr(self, name), choices)
        check_share("init_measured_ratio", self.init_measured_ratio, "[0, 1]")
        check_share("genetic_mutate_prob", self.genetic_mutate_prob, "[0, 1]")

    def of_evolution(self) -> dict[str, Any]:
        """Return the options of MetaSchedule's own evolutionary search."""
        return {name: getattr(self, name) for name in _OF_EVOLUTION}
