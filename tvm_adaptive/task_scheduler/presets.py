"""Policies by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.arms import Policy
from tvm_adaptive.task_scheduler.foresight import check_share
from tvm_adaptive.task_scheduler.gradient import GradientPolicy

# The default's belief and economy under another action function.
_INDICES = ("epsilon-greedy", "softmax")
POLICIES = ("default", "paper", "random", "linear", "round-robin", "gradient", *_INDICES)
# TVM's own batch, for a run that does not say its own.
_BATCH = 64


def check_policy_name(name: str) -> None:
    """Raise unless a policy has this name."""
    if name not in POLICIES:
        raise InvalidOptionError(
            f"Unknown policy {name!r}; possible are {', '.join(POLICIES)}, or an object with a "
            "method choose(arms, rng)."
        )


def check_limits(
    budget_sec: float | None,
    warm_up_trials: int,
    patience_trials: int | None,
    foresee_share: float | None,
    max_waiting: int,
) -> None:
    """Raise unless a scheduler's limits can be kept."""
    if budget_sec is not None and not budget_sec > 0:
        raise InvalidOptionError(f"budget_sec must be above 0 but got {budget_sec}.")
    if warm_up_trials < 1:
        raise InvalidOptionError(f"warm_up_trials must be at least 1 but got {warm_up_trials}.")
    if patience_trials is not None and patience_trials < 1:
        raise InvalidOptionError(f"patience_trials must be at least 1 but got {patience_trials}.")
    if max_waiting < 1:
        raise InvalidOptionError(f"max_waiting must be at least 1 but got {max_waiting}.")
    if foresee_share is not None:
        check_share(foresee_share)


def make_policy(
    name: str,
    *,
    batch: int | None = None,
    slot_rounds: int = 1,
    slot_sec: float | None = None,
    warm_up_trials: int | None = None,
    patience_trials: int | None = None,
    **options: Any,
) -> Policy:
    """Return a new policy, fitted to the slots that it decides on."""
    # Imported here: forecasting wants libraries that the baselines can do without.
    from tvm_adaptive.task_scheduler import baselines

    check_policy_name(name)
    if patience_trials is not None:
        options["patience_trials"] = patience_trials
    if name == "gradient":
        return GradientPolicy()
    if name == "random":
        return baselines.at_random(**options)
    if name == "linear":
        return baselines.linear(**options)
    if name == "round-robin":
        return baselines.round_robin(**options)
    from tvm_adaptive.task_scheduler.policy import PRESETS, DynaTunePolicy

    chosen = PRESETS.get(name, PRESETS["default"])
    warm_up = chosen.warm_up
    if warm_up_trials is not None and warm_up.n_trials is not None:
        warm_up = dataclasses.replace(warm_up, n_trials=warm_up_trials)
    changes: dict[str, Any] = {
        "slot_trials": slot_rounds * (batch or _BATCH),
        "slot_sec": slot_sec,
        "warm_up": warm_up,
        **({"index": name} if name in _INDICES else {}),
        **options,
    }
    return DynaTunePolicy(dataclasses.replace(chosen, **changes))
