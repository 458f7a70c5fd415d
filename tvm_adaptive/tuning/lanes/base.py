"""What a place is that fills orders, several at the same time."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from tvm_adaptive.errors import LaneError
from tvm_adaptive.tuning.lanes.request import SearchRequest, SearchResult

# A round that has not come back by then never will: a lane's machine may be gone for good.
ORDER_TIMEOUT_SEC = 600.0
# How often one that waits for an order looks whether anybody is left to fill it.
LOOK_SEC = 5.0
# What a lane brought, or why none could bring it.
Answer = SearchResult | LaneError


class Lanes(Protocol):
    """Processes or machines, each of which fills one order at a time."""

    @property
    def n_lanes(self) -> int:
        """Orders that are filled at the same time."""

    def submit(self, order: SearchRequest) -> Future[Answer]:
        """Have an order filled."""

    def is_alive(self) -> bool:
        """Say whether anybody is left to fill an order."""

    def close(self) -> None:
        """End what is under way."""
