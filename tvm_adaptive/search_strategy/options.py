"""The rules for the options of the search."""

from __future__ import annotations

from tvm_adaptive.errors import InvalidOptionError

DIVERSITY = ("none", "knobs", "medoids")


def check_options(
    population_size: int,
    init_measured_ratio: float,
    n_initial: int,
    n_plans: int,
    diversity: str,
) -> None:
    """Check what :class:`~tvm_adaptive.search_strategy.AdaptiveSearch` was given.

    Raises
    ------
    InvalidOptionError
        Names the option, its rule and what was given.
    """
    if population_size < 1:
        raise InvalidOptionError(f"population_size must be at least 1 but got {population_size}.")
    if not 0.0 <= init_measured_ratio <= 1.0:
        raise InvalidOptionError(
            f"init_measured_ratio must be in [0, 1] but got {init_measured_ratio}."
        )
    if n_initial < 0:
        raise InvalidOptionError(f"n_initial must be at least 0 but got {n_initial}.")
    if n_plans < 1:
        raise InvalidOptionError(f"n_plans must be at least 1 but got {n_plans}.")
    if diversity not in DIVERSITY:
        raise InvalidOptionError(
            f"diversity must be one of {', '.join(DIVERSITY)} but got {diversity!r}."
        )
