"""What a search strategy asks of where candidates come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tvm_adaptive._tvm import Database, Schedule
from tvm_adaptive.values.hash_set import HashSet
from tvm_adaptive.values.trial import Prediction


class Proposer(Protocol):
    """Where one task's candidates come from."""

    measured: HashSet

    @property
    def best_sec(self) -> float | None:
        """Seconds of the fastest that was measured, lower is better."""

    @property
    def n_population(self) -> int:
        """Programs that the round looked at before its search."""

    @property
    def n_spares(self) -> int:
        """Proposals of earlier rounds that still compete."""

    def start(self, max_trials: int, design_spaces: list[Schedule], database: Database) -> None:
        """Learn of the task, and of what the database knows of it."""

    def end(self) -> None:
        """Let go of the task."""

    def sample(self, n: int | None) -> list[Schedule] | None:
        """Begin a round: return random candidates, ``n`` or a full round's.

        Unmeasured, in random order; None if the space has no valid one left.
        """

    def posterior(self, n_plans: int) -> Prediction | None:
        """Return what the cost model believes of that many of them."""

    def expected_drop(self) -> float | None:
        """Return the share of its latency that the task's best proposal may save.

        None where the model says nothing of proposals that it has.
        """

    def recalled(self, n: int) -> list[Schedule]:
        """Return up to ``n`` candidates that an earlier run found best for this task."""

    def seeded(self, n: int) -> list[Schedule]:
        """Return candidates that were good for the task's relatives; some of ``n``."""

    def screened(self, n: int, without: Sequence[Schedule] = ()) -> list[Schedule]:
        """Return ``n`` candidates that the model prefers, without a search.

        None of ``without``, which are in the batch already.
        """

    def searched(self, n: int) -> list[Schedule]:
        """Return up to ``n`` unmeasured candidates, the best that a search found."""

    def sent(self, batch: Sequence[Schedule]) -> None:
        """Never propose these again."""

    def learned(self, schedules: Sequence[Schedule], seconds: Sequence[float | None]) -> None:
        """Learn what candidates took; None is a failure."""
