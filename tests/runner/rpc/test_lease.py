"""What a worker asks a tracker, and what it does with the device; the tracker is scripted."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time

import pytest
from tvm.s_tir.meta_schedule.runner import RPCConfig

from tvm_adaptive._tvm import rpc_base
from tvm_adaptive.errors import AdaptiveError
from tvm_adaptive.runner.rpc import lease
from tvm_adaptive.workers import device_session

KEY = "board"
CODE = rpc_base.TrackerCode


class Tracker:
    """Answers requests from lists, the last entry again and again.

    None among the offers keeps a client waiting, until a device is listed.
    """

    def __init__(self):
        self.offers = []
        self.listed = [[]]
        self.magic = rpc_base.RPC_TRACKER_MAGIC
        self.code = CODE.SUCCESS
        self.n_requests = 0
        self._waiting = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._open = []
        self.config = RPCConfig("127.0.0.1", self._socket.getsockname()[1], KEY, 0, 1)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self):
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for each in (self._socket, *self._open):
            each.close()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                self._open.append(client)
                rpc_base.recvall(client, 4)
                magic = self.magic  # a test changes it as soon as it has the answer
                client.sendall(struct.pack("<i", magic))
                if magic == rpc_base.RPC_TRACKER_MAGIC:
                    self._answer(client, rpc_base.recvjson(client))

    def _answer(self, client, request):
        if request[0] == CODE.SUMMARY:
            listed = self.listed.pop(0) if len(self.listed) > 1 else self.listed[0]
            servers = [{"key": f"server:{key}", "addr": [host, 9000]} for key, host in listed]
            rpc_base.sendjson(client, [self.code, {"server_info": servers}])
            while listed and self._waiting:
                self._offer(self._waiting.pop(), listed[0][1])
        else:
            assert request[:2] == [CODE.REQUEST, KEY]
            self.n_requests += 1
            offer = self.offers.pop(0)
            if offer is None:
                self._waiting.append(client)
            else:
                self._offer(client, offer)

    def _offer(self, client, host):
        rpc_base.sendjson(client, [self.code, [host, 9000, f"{KEY}:secret"]])


@pytest.fixture
def tracker(monkeypatch):
    monkeypatch.setattr(lease, "TRACKER_POLL_SEC", 0.01)
    tracker = Tracker()
    yield tracker
    tracker.close()
    lease.release()


def test_only_devices_of_the_key_are_known(tracker):
    tracker.listed = [[(KEY, "b"), ("other", "c"), (KEY, "a")]]
    assert lease.known_devices(tracker.config, 0.0) == ("a:9000", "b:9000")


def test_the_first_device_is_waited_for(tracker):
    tracker.listed = [[], [], [(KEY, "late")]]
    assert lease.known_devices(tracker.config, 60.0) == ("late:9000",)
    tracker.listed = [[]]
    assert lease.known_devices(tracker.config, 0.0) == ()


def test_a_server_of_another_kind_and_a_refusal_are_errors(tracker):
    tracker.magic = 1
    with pytest.raises(OSError, match="is no RPC tracker"):
        lease.known_devices(tracker.config, 0.0)
    tracker.magic = rpc_base.RPC_TRACKER_MAGIC
    tracker.code = CODE.FAIL
    with pytest.raises(OSError, match="the tracker answered -1"):
        lease.known_devices(tracker.config, 0.0)


def test_a_tracker_that_is_away_is_asked_again_until_it_is_late(tracker, monkeypatch):
    asked = []

    def ask(config):
        asked.append(config)
        if len(asked) < 3:
            raise ConnectionRefusedError("away")
        return ("a:9000",)

    monkeypatch.setattr(lease, "_ask_devices", ask)
    assert lease.known_devices(tracker.config, 60.0) == ("a:9000",)
    asked.clear()
    with pytest.raises(ConnectionRefusedError):
        lease.known_devices(tracker.config, 0.0)
    assert len(asked) == 1


def restart(monkeypatch):
    """Let a tracker refuse connections; return a list with an element for each that it refuses."""
    connect, refused = socket.create_connection, [True, True]

    def restarting(*arguments):
        if refused:
            refused.pop()
            raise ConnectionRefusedError("restarting")
        return connect(*arguments)

    monkeypatch.setattr(lease.socket, "create_connection", restarting)
    return refused


def test_a_tracker_that_restarts_while_a_device_is_asked_for_fails_nothing(tracker, monkeypatch):
    tracker.listed = [[(KEY, "a")]]
    tracker.offers = ["a"]
    refused = restart(monkeypatch)
    assert lease.queue_for_device(tracker.config, {}, 60.0)[0] == "a:9000"
    refused[:] = [True, True]
    with pytest.raises(ConnectionRefusedError):
        lease.queue_for_device(tracker.config, {}, 0.0)


def test_a_tracker_may_restart_after_a_long_wait(tracker, monkeypatch):
    """What counts is how long it stays away, not how long devices were waited for."""
    tracker.listed = [[(KEY, "a")]]
    tracker.offers = ["a"]
    now, request, lost = [0.0], lease._request_once, [True]

    def wait_and_lose(*arguments):
        if lost:
            lost.pop()
            now[0] += 30.0
            raise ConnectionResetError("the tracker ends")
        return request(*arguments)

    monkeypatch.setattr(lease.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(lease, "_request_once", wait_and_lose)
    known = lease.known_devices(tracker.config, 10.0)
    restart(monkeypatch)
    assert known
    assert lease._request(tracker.config, 10.0, False)[0] == "a"


def test_an_avoided_device_is_taken_only_if_there_is_no_other(tracker):
    tracker.listed = [[(KEY, "bad"), (KEY, "good")]]
    tracker.offers = ["bad", "bad", "good"]
    address, devices = lease.queue_for_device(tracker.config, {"bad:9000": math.inf}, 0.0)
    assert (address, devices) == ("good:9000", ("bad:9000", "good:9000"))
    assert tracker.n_requests == 3
    tracker.listed = [[(KEY, "bad")]]
    tracker.offers = ["bad"]
    assert lease.queue_for_device(tracker.config, {"bad:9000": math.inf}, 0.0)[0] == "bad:9000"


def test_an_avoided_device_is_taken_after_a_while(tracker):
    tracker.listed = [[(KEY, "bad"), (KEY, "good")]]
    tracker.offers = ["bad"]
    assert lease.queue_for_device(tracker.config, {"bad:9000": 0.0}, 0.0)[0] == "bad:9000"


def test_each_avoided_device_rests_for_seconds_of_its_own(tracker):
    tracker.listed = [[(KEY, "ill"), (KEY, "rested"), (KEY, "good")]]
    tracker.offers = ["ill", "rested"]
    rests = {"ill:9000": 900.0, "rested:9000": 0.0}
    assert lease.queue_for_device(tracker.config, rests, 0.0)[0] == "rested:9000"


def test_nobody_queues_for_a_device_that_has_left(tracker):
    tracker.offers = [None]
    with pytest.raises(AdaptiveError, match="no server with the key 'board' is left"):
        lease.queue_for_device(tracker.config, {}, 0.0)


def test_a_run_waits_for_a_device_that_comes_back(tracker):
    tracker.offers = [None]
    tracker.listed = [[], [], [], [(KEY, "a")]]
    found = lease.queue_for_device(tracker.config, {}, 0.0, waits_for_server=True)
    assert found == ("a:9000", ("a:9000",))


class Session:
    """A device that may stop to answer."""

    answers = True

    def get_function(self, name):
        if not self.answers:
            raise OSError("connection reset")
        return name


def test_a_device_is_held_until_its_session_ends_or_it_is_given_back(tracker, monkeypatch):
    tracker.listed, tracker.offers = [[(KEY, "a")]], ["a"]
    assert lease.held_device(0.0) is None
    lease.queue_for_device(tracker.config, {}, 0.0)
    assert lease.held_device(0.0) is None  # offered, not connected
    connected = []

    def connect(*arguments):
        connected.append(arguments)
        return Session()

    monkeypatch.setattr(lease, "rpc_connect", connect)
    lease.open_session(100)
    assert connected == [("a", 9000, f"{KEY}:secret", 100)]
    assert lease.held_device(50.0) == "a:9000"
    assert lease.held_device(101.0) is None  # its session ends too soon
    assert device_session.is_elsewhere()
    lease.release()
    assert lease.held_device(0.0) is None
    assert not device_session.is_elsewhere()


def test_a_failed_measurement_says_whether_the_device_is_at_fault(tracker):
    def crash():
        raise RuntimeError("bad candidate")

    session = Session()
    device_session.move_to(session)
    assert lease.measure_leased(time.time) > 0
    failed = lease.measure_leased(crash)
    assert "bad candidate" in failed.traceback
    assert failed.is_device_alive
    session.answers = False
    assert not lease.measure_leased(crash).is_device_alive
