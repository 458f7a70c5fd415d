"""Policies by name, and a fresh policy for each run."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler import baselines
from tvm_adaptive.task_scheduler.arms import Policy
from tvm_adaptive.task_scheduler.policy import PRESETS, DynaTunePolicy

logger = logging.getLogger(__name__)

_BASELINES: Mapping[str, Callable[..., Policy]] = {
    "random": baselines.at_random,
    "linear": baselines.linear,
    "round-robin": baselines.round_robin,
}
# The default's forecast and warm-up under another action function.
_INDICES = ("epsilon-greedy", "softmax")
POLICIES = (*PRESETS, *_BASELINES, "gradient", *_INDICES)


def check_policy_name(name: str) -> None:
    """Raise unless a policy has this name."""
    if name not in POLICIES:
        raise InvalidOptionError(
            f"Unknown policy {name!r}; possible are {', '.join(POLICIES)}, or an object with a "
            "method choose(arms, rng)."
        )


def make_policy(
    name: str,
    *,
    slot_trials: int,
    slot_sec: float | None = None,
    warm_up_trials: int | None = None,
    patience_trials: int | None = None,
) -> Policy:
    """Return a new policy, fitted to the slots that it decides on."""
    check_policy_name(name)
    if name == "gradient":
        return baselines.GradientPolicy()
    if name in _BASELINES:
        return _BASELINES[name](patience_trials=patience_trials)
    options = dataclasses.replace(
        PRESETS.get(name, PRESETS["default"]), slot_trials=slot_trials, slot_sec=slot_sec
    )
    if name in _INDICES:
        options = dataclasses.replace(options, index=name)
    if patience_trials is not None:
        options = dataclasses.replace(options, patience_trials=patience_trials)
    if warm_up_trials is not None and options.warm_up.n_trials is not None:
        warm_up = dataclasses.replace(options.warm_up, n_trials=warm_up_trials)
        options = dataclasses.replace(options, warm_up=warm_up)
    return DynaTunePolicy(options)


def fresh_copy(policy: Policy) -> Policy:
    """Return a user's policy in the state for a new run: reset if it can be, else copied."""
    reset = getattr(policy, "reset", None)
    if reset is not None:
        reset()
        return policy
    try:
        return copy.deepcopy(policy)
    except Exception:  # whatever a user's __deepcopy__ raises
        logger.warning("%s can't be copied; the next run starts with its present state", policy)
        return policy
