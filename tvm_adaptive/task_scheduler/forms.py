"""What slots are worth to tasks that compete with other forms of the same part of a network."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tvm_adaptive.task_scheduler.arms import Arm
from tvm_adaptive.values.forms import DIRECT, FormKey, form_costs
from tvm_adaptive.values.improvement import expected_improvement

# Another form begins where the direct one would if its work is below this share: it has three
# or four tasks to try instead of one or two.
_PROMISING_SHARE = 0.8
# The standard deviation of what a form takes in the end, as a share of what its work and the
# network's rate let expect: that of tuned forms on ResNet-18 and a text detector.
_SPREAD = 0.35


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
        self._works = form_costs(keys, [arm.work for arm in arms])

    def first(self, live: Sequence[int]) -> list[int]:
        """Return the arms to warm up at first: of each part, the form with the least work."""
        chosen = {group: self._promising(group) for group in self._works}
        keys = [self._arms[k].key for k in live]
        pairs = zip(live, keys, strict=True)
        return [k for k, key in pairs if not key.group or chosen[key.group] == key.form]

    def begun(self, live: Sequence[int]) -> list[int]:
        """Return the arms without a result of forms that have begun and can still succeed."""
        found = []
        for members in self._members.values():
            if self._has_begun(members) and not self._is_lost(members):
                found += [k for k in members if k in live and math.isinf(self._arms[k].best_ms)]
        return sorted(found)

    def worth(self, gains_ms: Mapping[int, float]) -> dict[int, float]:
        """Return what the gains of arms are worth to the network, by arm, in milliseconds.

        The arms of a form that is behind gain nothing until they have caught up together, and
        those of a form with a task that failed never do.
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
        """Return the expected gain in ms, and the seconds, of each form that has not begun.

        By the form's largest arm, which is to be played first; the seconds are all its arms'.
        """
        found = {}
        for key, members in self._members.items():
            if self._has_begun(members) or not all(k in live for k in members):
                continue
            saved_ms = self._expected_saving_ms(key)
            if saved_ms > 0.0:
                seconds = len(members) * n_trials * sec_per_trial
                found[max(members, key=lambda k: self._arms[k].work)] = (saved_ms, seconds)
        return found

    def _promising(self, group: str) -> str:
        """Return the form of a part that is tried first."""
        works = {
            form: work
            for form, work in self._works[group].items()
            if not self._is_lost(self._members[FormKey(group, form)])
        }
        least = min(works, key=lambda form: works[form], default=DIRECT)
        promises = works.get(least, 0.0) < _PROMISING_SHARE * works.get(DIRECT, math.inf)
        return least if promises else DIRECT

    def _expected_saving_ms(self, key: FormKey) -> float:
        """Return what a form is expected to save."""
        costs_ms, works = self._costs_ms[key.group], self._works[key.group]
        least_ms = min(costs_ms.values())
        if not 0.0 < least_ms < math.inf:  # no result yet, or nothing to save: of weight 0
            return 0.0
        # As fast as another form of the part, or as the network is where that is slow.
        ms_per_work = min(
            self._network_ms_per_work,
            *(costs_ms[form] / works[form] for form in costs_ms if costs_ms[form] < math.inf),
        )
        expected_ms = ms_per_work * works[key.form]
        return float(expected_improvement(-expected_ms, _SPREAD * expected_ms, -least_ms))

    @functools.cached_property
    def _network_ms_per_work(self) -> float:
        known = [arm for arm in self._arms if math.isfinite(arm.best_ms)]
        return math.fsum(arm.share_ms for arm in known) / math.fsum(arm.work for arm in known)

    def _behind_ms(self, key: FormKey) -> float:
        """Return by how much a form is behind the fastest; 0 for that, and if not known."""
        costs_ms = self._costs_ms[key.group]
        own_ms, least_ms = costs_ms[key.form], min(costs_ms.values())
        if math.isinf(own_ms):
            # The direct form's tasks are deployed one by one.
            is_lost = key.form != DIRECT and self._is_lost(self._members[key])
            return math.inf if is_lost else 0.0
        return own_ms - least_ms

    def _has_begun(self, members: Sequence[int]) -> bool:
        return any(self._arms[k].n_slots for k in members)

    def _is_lost(self, members: Sequence[int]) -> bool:
        """Say whether an arm has ended without a result."""
        arms = [self._arms[k] for k in members]
        ended = (arm for arm in arms if arm.finished and not arm.is_under_way)
        return any(math.isinf(arm.best_ms) for arm in ended)
