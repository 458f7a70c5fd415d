"""Lanes that are tasks of a Ray cluster: search and build on other machines."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from tvm_adaptive.errors import InvalidOptionError, LaneError, essence
from tvm_adaptive.lanes.base import Answer
from tvm_adaptive.lanes.fill import fill
from tvm_adaptive.lanes.order import Order

# Ray starts a task anew when its node dies; a task that kills nodes must not go on so.
_MAX_RETRIES = 2


class RayLanes:
    """Tasks of a Ray cluster, one order each.

    A node that dies costs the orders that it was filling, which are filled elsewhere.

    Parameters
    ----------
    address : str
        Of the cluster: ``"host:port"``, ``"auto"`` for the one that this machine belongs
        to, or ``"local"`` for one that is started here.
    cpus_per_lane : int, default 2

    Raises
    ------
    InvalidOptionError
        When Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, address: str, *, cpus_per_lane: int = 2) -> None:
        try:
            import ray
        except ImportError as error:
            raise InvalidOptionError('Ray is missing: pip install "tvm-adaptive[ray]".') from error
        self._ray: Any = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            try:
                ray.init(address=address, log_to_driver=False, include_dashboard=False)
            except Exception as error:
                raise InvalidOptionError(
                    f"The Ray cluster at {address} cannot be joined ({essence(error)}). Look at "
                    f"it with: ray status --address {address}"
                ) from error
        n_cpus = int(self._ray.cluster_resources().get("CPU", 1))
        self._cpus = min(cpus_per_lane, n_cpus)
        self._n_lanes = max(1, n_cpus // self._cpus)
        self._fill = ray.remote(num_cpus=self._cpus, max_retries=_MAX_RETRIES)(fill)

    @property
    def n_lanes(self) -> int:
        """Orders that are filled at the same time."""
        return self._n_lanes

    def submit(self, order: Order) -> Future[Answer]:
        """Have an order filled, elsewhere if its node is lost."""
        answer: Future[Answer] = Future()
        inner: Future[Any] = self._fill.remote(order).future()

        def pass_on(done: Future[Any]) -> None:
            try:
                answer.set_result(done.result())
            except BaseException as error:  # Ray's own, and cancelled at the end
                answer.set_result(LaneError(essence(error)))

        inner.add_done_callback(pass_on)
        return answer

    def close(self) -> None:
        """Leave the cluster; what is under way there is cancelled."""
        if self._is_ours:
            self._ray.shutdown()
