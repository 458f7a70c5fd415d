"""Requests to a Ray cluster, by a stand-in for Ray; the cluster itself is tested elsewhere."""

from __future__ import annotations

import signal
import socket
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from tvm_adaptive.errors import InvalidOptionError, LaneError
from tvm_adaptive.tuning.lanes.fill import fill
from tvm_adaptive.tuning.lanes.lanes import RayLanes


class FakeRay:
    """Nodes with so many processors each, and the requests that they were given."""

    def __init__(self, *cpus, is_initialized=True):
        self.cpus = list(cpus)
        self.dead_cpus = [64]
        self.is_up = is_initialized
        self.refusal = None
        self.joined = []
        self.options = {}
        self.answers = []
        self.cancelled = []

    def is_initialized(self):
        return self.is_up

    def init(self, address, **_options):
        if self.refusal is not None:
            raise self.refusal
        self.is_up = True
        self.joined.append(address)

    def shutdown(self):
        self.is_up = False

    def cancel(self, task, *, force):
        assert force
        self.cancelled.append(task)

    def nodes(self):
        alive = [{"Alive": True, "Resources": {"CPU": float(n)} if n else {}} for n in self.cpus]
        return alive + [{"Alive": False, "Resources": {"CPU": n}} for n in self.dead_cpus]

    def remote(self, **options):
        self.options = options

        def wrap(function):
            def submit(_request):
                self.answers.append((function, Future()))
                return SimpleNamespace(future=lambda: self.answers[-1][1])

            return SimpleNamespace(remote=submit)

        return wrap


@pytest.fixture
def ray(monkeypatch):
    fake = FakeRay(5, 2, 1, 0)
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.mark.parametrize(
    ("cpus", "n_lanes", "per_lane"),
    [
        ([5, 2, 1, 0], 3, 2),  # two, one, none, none
        ([1, 1], 2, 1),
        ([0], 1, 1),
        ([], 1, 1),
    ],
)
def test_a_lane_fits_on_one_node(cpus, n_lanes, per_lane, ray):
    ray.cpus = cpus
    assert RayLanes("auto").n_lanes == n_lanes
    assert ray.options["num_cpus"] == per_lane


def test_answers_and_failures_are_passed_on(ray):
    lanes = RayLanes("auto")
    good, bad, cancelled = (lanes.submit("request") for _ in range(3))
    assert not good.done()
    (function, answer), (_, failure), (_, pending) = ray.answers
    assert function is fill
    answer.set_result("batch")
    failure.set_exception(RuntimeError("the node has died"))
    assert pending.cancel()
    pending.set_running_or_notify_cancel()
    assert good.result(0) == "batch"
    assert isinstance(bad.result(0), LaneError)
    assert "has died" in str(bad.result(0))
    assert isinstance(cancelled.result(0), LaneError)
    lanes.submit("request")
    lanes.close()
    assert len(ray.cancelled) == 1, "what is answered needs no cancelling"


def test_without_a_node_a_request_is_answered_at_once(ray):
    lanes = RayLanes("auto")
    assert lanes.is_alive()
    ray.cpus = [1]  # room for none
    assert not lanes.is_alive()
    assert "no node of the cluster is left" in str(lanes.submit("request").result(0))
    assert not ray.answers


def test_only_a_cluster_that_was_joined_here_is_left(ray):
    RayLanes("auto").close()
    assert ray.is_up
    assert not ray.joined
    ray.is_up = False
    lanes = RayLanes("auto")
    assert ray.joined == ["auto"]
    lanes.close()
    assert not ray.is_up


def test_a_cluster_that_cannot_be_joined_is_named(ray):
    ray.is_up = False
    with socket.socket() as nobody:  # bound, but it does not listen
        nobody.bind(("127.0.0.1", 0))
        address = f"ray://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(InvalidOptionError, match=f"cluster at {address} cannot be joined"):
            RayLanes(address)
        with pytest.raises(InvalidOptionError, match="cannot be joined"):
            RayLanes("127.0.0.1:70000")
        nobody.listen()
        RayLanes(address).close()
    ray.refusal = ConnectionError("wrong version")
    with pytest.raises(InvalidOptionError, match=r"wrong version.*ray status --address auto"):
        RayLanes("auto")


def test_an_ipv6_address_has_brackets(ray, monkeypatch):
    asked = []
    monkeypatch.setattr(
        socket, "create_connection", lambda address, _sec: asked.append(address) or socket.socket()
    )
    ray.is_up = False
    RayLanes("[fd00::5]:6379")
    assert asked == [("fd00::5", 6379)]
    assert ray.joined == ["[fd00::5]:6379"]


def test_the_handlers_of_an_end_stay_this_programs(ray, monkeypatch):
    """Ray sets one that raises wherever the main thread is, and at its end the system's."""

    def replace(*_arguments, **_options):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))

    ray.is_up = False
    monkeypatch.setattr(ray, "init", replace)
    monkeypatch.setattr(ray, "shutdown", replace)
    own = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        present = [signal.getsignal(number) for number in own]
        lanes = RayLanes("auto")
        assert [signal.getsignal(number) for number in own] == present
        lanes.close()
        assert [signal.getsignal(number) for number in own] == present
    finally:
        for number, handler in own.items():
            signal.signal(number, handler)


def test_without_ray_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidOptionError, match=r'pip install "tvm-adaptive\[ray\]"'):
        RayLanes("auto")
