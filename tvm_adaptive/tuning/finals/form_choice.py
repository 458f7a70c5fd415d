"""Which forms of a network's parts are checked and deployed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tvm_adaptive._tvm import IRModule, argument_bytes, estimate_tir_flops
from tvm_adaptive.measure_callback.progress import RunProgress
from tvm_adaptive.runner.playoff.playoff import FinalistReport
from tvm_adaptive.tuning.finals.finalists import Finalists
from tvm_adaptive.values import roofline
from tvm_adaptive.values.forms import DIRECT, NO_FORM, FormKey, fastest_forms, form_costs, in_use

# How much longer than with the best of four trials a task takes with its first draft.
_DRAFT_FACTOR = 1.5


@dataclasses.dataclass(frozen=True)
class FormChoice:
    """The fastest form of each part, by the best records of its tasks."""

    keys: list[FormKey]  # of all tasks
    finalists: list[Finalists]  # of tasks in use; others have no records here
    used: list[bool]  # whether a task is in use
    _all: Sequence[Finalists]
    _is_direct: bool = False  # other forms are not used

    @classmethod
    def of(
        cls,
        finalists: Sequence[Finalists],
        forms: Mapping[str, FormKey],
        drafted_works: Mapping[int, float] = MappingProxyType({}),
        *,
        is_direct: bool = False,
    ) -> FormChoice:
        """Choose by the records of tasks; ``forms`` has the keys by the names of tasks.

        Tasks without a record of which drafts will be made count as their work lets expect.
        If all is to be direct, other forms are not used.
        """
        keys = [forms.get(each.name, NO_FORM) for each in finalists]
        costs = [each.importance_sec if each.records else math.inf for each in finalists]
        known = [i for i in drafted_works if math.isfinite(costs[i])]
        # Without any record, works are compared as they are.
        sec_per_work = (
            math.fsum(costs[i] for i in known) / math.fsum(drafted_works[i] for i in known)
            if known
            else 1.0
        )
        for i, work in drafted_works.items():
            if math.isinf(costs[i]):
                costs[i] = _DRAFT_FACTOR * sec_per_work * work
        if is_direct:
            pairs = zip(keys, costs, strict=True)
            costs = [cost if key.form == DIRECT else math.inf for key, cost in pairs]
        used = in_use(keys, costs)
        found = [
            each if is_used else each.unused()
            for each, is_used in zip(finalists, used, strict=True)
        ]
        return cls(keys, found, used, finalists, is_direct)

    @property
    def is_complete(self) -> bool:
        """Whether every form in use but the direct one has records of all its tasks."""
        return all(self.finalists[i].records for i in self.of_other_forms)

    @property
    def of_other_forms(self) -> list[int]:
        """The tasks in use that the untuned network does not call."""
        return [i for i, key in enumerate(self.keys) if self.used[i] and key.form != DIRECT]

    def without_unchecked(
        self, reports: Mapping[int, FinalistReport], *, only_direct: bool = False
    ) -> FormChoice:
        """Return the choice that is left if forms with an unchecked task are not used.

        What takes their place is the fastest of the other forms that are proven; without one,
        or with ``only_direct``, it is the direct form.
        """
        lost = {
            key.group
            for i, key in enumerate(self.keys)
            if key.group and self.used[i] and reports[i].winner is None
        }
        proven = {} if only_direct or self._is_direct else self._fastest_proven()
        used = [
            key.form == proven.get(key.group, DIRECT) if key.group in lost else is_used
            for key, is_used in zip(self.keys, self.used, strict=True)
        ]
        pairs = zip(self.keys, self.used, used, strict=True)
        changed = {key.group for key, was_used, is_used in pairs if was_used != is_used}
        if not changed:
            return self
        finalists = [
            whole if key.group in changed else each
            for key, each, whole in zip(self.keys, self.finalists, self._all, strict=True)
        ]
        return dataclasses.replace(self, used=used, finalists=finalists)

    def _fastest_proven(self) -> dict[str, str]:
        """Return of each group the fastest form not in use of which all tasks are proven."""
        costs = [
            each.importance_sec if each.proven is not None and not is_used else math.inf
            for each, is_used in zip(self._all, self.used, strict=True)
        ]
        forms = form_costs(self.keys, costs)
        fastest = fastest_forms(forms)
        return {group: form for group, form in fastest.items() if math.isfinite(forms[group][form])}

    def as_fields(self, progress: RunProgress) -> dict[str, Any]:
        """Return what was tried of each part and what was chosen, for the journal."""
        costs_ms = [each.importance_sec * 1e3 if each.records else math.inf for each in self._all]
        costs = form_costs(self.keys, costs_ms)
        pairs = zip(self.keys, self.used, strict=True)
        chosen = {key.group: key.form for key, is_used in pairs if is_used}
        return {
            group: {
                "chosen": chosen.get(group) or "direct",
                "forms": {
                    form or "direct": {
                        "ms": cost_ms,
                        "n_trials": sum(
                            task.n_trials
                            for task, key in zip(progress.tasks, self.keys, strict=True)
                            if key == (group, form)
                        ),
                    }
                    for form, cost_ms in forms.items()
                },
            }
            for group, forms in costs.items()
        }


def as_decided(
    finalists: Sequence[Finalists], forms: Mapping[str, FormKey], chosen: Mapping[str, str]
) -> list[Finalists]:
    """Return finalists without the forms that a run has decided against, by their groups.

    A run also chooses a form by what its drafts let expect. Of a group whose chosen form is no
    longer proven, all stay.
    """
    keys = [forms.get(each.name, NO_FORM) for each in finalists]
    of_chosen = [
        (key.group, each.proven is not None)
        for key, each in zip(keys, finalists, strict=True)
        if chosen.get(key.group) == key.form
    ]
    stands = {group for group, _ in of_chosen if (group, False) not in of_chosen}
    return [
        each.unused() if key.group in stands and key.form != chosen[key.group] else each
        for key, each in zip(keys, finalists, strict=True)
    ]


def work_of(mod: IRModule) -> float:
    """Return operations that take about as long as a task's operations and bytes together."""
    return roofline.work(float(estimate_tir_flops(mod)), argument_bytes(mod))
