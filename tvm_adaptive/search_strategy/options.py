"""The rules for the options of the search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.search_strategy.exploration import check_epsilon

PROPOSERS = ("distilled", "evolution")
DIVERSITY = ("none", "knobs", "medoids")


def check_options(
    native: Mapping[str, Any],
    *,
    proposer: str,
    n_samples: int,
    epsilon: float | None,
    n_initial: int,
    n_plans: int,
    diversity: str,
) -> None:
    """Check what :class:`~tvm_adaptive.search_strategy.AdaptiveSearch` was given."""
    check_epsilon(epsilon)
    population_size, ratio = native["population_size"], native["init_measured_ratio"]
    if population_size < 1:
        raise InvalidOptionError(f"population_size must be at least 1 but got {population_size}.")
    if not 0.0 <= ratio <= 1.0:
        raise InvalidOptionError(f"init_measured_ratio must be in [0, 1] but got {ratio}.")
    if proposer not in PROPOSERS:
        raise InvalidOptionError(
            f"proposer must be one of {', '.join(PROPOSERS)} but got {proposer!r}."
        )
    if n_samples < 1:
        raise InvalidOptionError(f"n_samples must be at least 1 but got {n_samples}.")
    if n_initial < 0:
        raise InvalidOptionError(f"n_initial must be at least 0 but got {n_initial}.")
    if n_plans < 1:
        raise InvalidOptionError(f"n_plans must be at least 1 but got {n_plans}.")
    if diversity not in DIVERSITY:
        raise InvalidOptionError(
            f"diversity must be one of {', '.join(DIVERSITY)} but got {diversity!r}."
        )
