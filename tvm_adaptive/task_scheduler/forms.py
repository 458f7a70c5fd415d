"""What slots are worth to tasks that compete with other forms of the same part of a network."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tvm_adaptive.task_scheduler.arms import Arm
from tvm_adaptive.values.forms import DIRECT, FormKey, form_costs

# A form with a share s of the operations takes about 1.8 s of the time: its transforms move
# more data than they compute. F(4x4, 3x3) has 0.27 and took 0.5 on layers of ResNet-18.
_OVERHEAD = 1.8


class FormArms:
    """The arms of the forms of a network's parts, at one decision."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self._arms = arms
        self._members: dict[FormKey, list[int]] = defaultdict(list)
        for k, arm in enumerate(arms):
            if arm.key.group:
                self._members[arm.key].append(k)
        keys = [arm.key for arm in arms]
        self._costs_ms = form_costs(keys, [arm.share_ms for arm in arms])

    def first(self, live: Sequence[int]) -> list[int]:
        """Return the arms to warm up before any form: those of the network as it is."""
        return [k for k in live if self._arms[k].key.form == DIRECT]

    def begun(self, live: Sequence[int]) -> list[int]:
        """Return the arms without a result of forms that have begun and can still succeed."""
        found = []
        for key, members in self._members.items():
            if key.form != DIRECT and self._has_begun(members) and not self._is_lost(members):
                found += [k for k in members if k in live and math.isinf(self._arms[k].best_ms)]
        return sorted(found)

    def worth(self, gains_ms: Mapping[int, float]) -> dict[int, float]:
        """Return what the gains of arms are worth to the network, by arm, in milliseconds.

        The arms of a form that is behind gain nothing until they have caught up together.
        """
        found = dict(gains_ms)
        for key, members in self._members.items():
            total_ms = math.fsum(gains_ms.get(k, 0.0) for k in members)
            behind_ms = self._behind_ms(key)
            if behind_ms <= 0.0 or total_ms <= 0.0:
                continue
            share = max(0.0, 1.0 - behind_ms / total_ms)
            found |= {k: share * gains_ms[k] for k in members if k in gains_ms}
        return found

    def openings(
        self, live: Sequence[int], n_trials: int, sec_per_trial: float
    ) -> dict[int, tuple[float, float]]:
        """Return the expected gain and the seconds of each form that has not begun.

        Returns
        -------
        dict of int to tuple of float
            Milliseconds of the network, and seconds of ``n_trials`` for each of its arms; by
            the form's largest arm, which is to be played first.
        """
        found = {}
        for key, members in self._members.items():
            if key.form == DIRECT or self._has_begun(members):
                continue
            if not all(k in live for k in members):
                continue
            saved_ms = self._expected_saving_ms(key, members)
            if saved_ms > 0.0:
                seconds = len(members) * n_trials * sec_per_trial
                largest = max(members, key=lambda k: self._arms[k].weight * self._arms[k].flop)
                found[largest] = (saved_ms, seconds)
        return found

    def _expected_saving_ms(self, key: FormKey, members: Sequence[int]) -> float:
        """Return what a form is expected to save, from its share of the operations."""
        direct = self._members.get(FormKey(key.group, DIRECT), [])
        costs_ms = self._costs_ms[key.group]
        direct_ms = costs_ms.get(DIRECT, math.inf)
        flop = self._flop(direct)
        if not flop or math.isinf(direct_ms):
            return 0.0
        expected_ms = _OVERHEAD * self._flop(members) / flop * direct_ms
        return min(costs_ms.values()) - expected_ms

    def _behind_ms(self, key: FormKey) -> float:
        """Return by how much a form is behind the fastest; 0 for that, and if not known."""
        costs_ms = self._costs_ms[key.group]
        own_ms, least_ms = costs_ms[key.form], min(costs_ms.values())
        return 0.0 if math.isinf(own_ms) else own_ms - least_ms

    def _has_begun(self, members: Sequence[int]) -> bool:
        return any(self._arms[k].n_slots for k in members)

    def _is_lost(self, members: Sequence[int]) -> bool:
        """Say whether an arm has ended without a result."""
        arms = [self._arms[k] for k in members]
        return any(arm.finished and math.isinf(arm.best_ms) for arm in arms)

    def _flop(self, members: Sequence[int]) -> float:
        return math.fsum(self._arms[k].weight * self._arms[k].flop for k in members)
