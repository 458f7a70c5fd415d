"""One queue for all devices: order, work put back, mistakes, and the end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tvm_adaptive.errors import WorkerError
from tvm_adaptive.workers.dispatcher import Dispatcher
from tvm_adaptive.workers.pool import Plan, Step, WorkerPool


class Office:
    """Doubles numbers in workers; what else a number does is up to the test."""

    def __init__(self, n_workers: int, overlap: bool) -> None:
        self.pool = WorkerPool(n_workers)
        self.dispatcher: Dispatcher[Any, Any] = Dispatcher(
            self.pool, self.plan, lambda job, reason: f"given up: {reason}", overlap=overlap
        )
        self.begun: list[int] = []
        self.before: Callable[[Any], None] = lambda job: None

    def plan(self) -> Plan:
        job = self.dispatcher.take()
        if job is None:
            return
        self.begun.append(job.index)
        self.before(job)
        try:
            answer = yield Step("doubling", double, (job.task,), 10.0)
        except WorkerError as error:
            answer = error
        self.dispatcher.settle(job, answer)

    def close(self) -> None:
        self.dispatcher.close()


def double(number: float) -> float:
    time.sleep(0.05)
    return 2 * number


@pytest.fixture(params=[False, True], ids=["waits", "overlaps"])
def office(request: Any) -> Iterator[Office]:
    with contextlib.closing(Office(2, request.param)) as office:
        yield office


def answers(futures: list[Any]) -> list[Any]:
    return [future.result(timeout=30) for future in futures]


def test_a_thread_that_could_not_start_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with contextlib.closing(Office(1, overlap=True)) as office:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError, match="new thread"):
                office.dispatcher.submit([1])
        assert answers(office.dispatcher.submit([2])) == [4]
        assert len(office.begun) == 1  # nobody waits for the first


def test_answers_come_in_the_order_of_the_batch(office: Office) -> None:
    assert answers(office.dispatcher.submit([1, 2, 3, 4, 5])) == [2, 4, 6, 8, 10]
    assert answers(office.dispatcher.submit([6])) == [12]
    assert sorted(office.begun) == list(range(6))


def test_an_empty_batch_is_answered(office: Office) -> None:
    assert office.dispatcher.submit([]) == []


def test_batches_share_the_queue() -> None:
    with contextlib.closing(Office(1, overlap=True)) as office:
        batches = [office.dispatcher.submit([n, n]) for n in range(3)]
        assert [answers(batch) for batch in batches] == [[0, 0], [2, 2], [4, 4]]
        assert office.begun == list(range(6))


def test_what_is_put_back_is_next(office: Office) -> None:
    class Lost(Exception):
        pass

    lost = []

    def lose_once(job: Any) -> None:
        if job.index == 1 and not lost:
            lost.append(job)
            office.dispatcher.put_back(job)
            raise Lost

    office.before = lose_once
    assert answers(office.dispatcher.submit([1, 2, 3])) == [2, 4, 6]
    assert office.begun == [0, 1, 1, 2]


def test_an_error_in_a_worker_is_an_answer(office: Office) -> None:
    good, bad = answers(office.dispatcher.submit([1, None]))
    assert good == 2
    assert isinstance(bad, WorkerError)


def test_the_late_are_given_up_and_the_others_not() -> None:
    with contextlib.closing(Office(1, overlap=False)) as office:

        def impatient(job: Any) -> None:
            office.dispatcher.fail_queued("too late", waited_sec=0.08)

        office.before = impatient
        found = answers(office.dispatcher.submit([1, 2, 3, 4]))
    assert found[:2] == [2, 4]
    assert set(found[2:]) <= {6, "given up: too late"}
    assert found[3] == "given up: too late"


def test_closing_ends_what_runs_and_gives_up_the_rest() -> None:
    office = Office(1, overlap=True)
    futures = office.dispatcher.submit([1] * 20)
    assert futures[0].result(timeout=30) == 2
    office.close()
    found = answers(futures)
    n_done = found.count(2)
    assert found == [2] * n_done + ["given up: the runner was closed"] * (20 - n_done)
    assert n_done < 20
    assert answers(office.dispatcher.submit([4])) == [8]
    office.close()


@pytest.mark.timeout(60)
def test_closing_ends_what_is_put_back_for_ever() -> None:
    office = Office(1, overlap=True)

    def refuse(job: Any) -> None:
        time.sleep(0.01)
        office.dispatcher.put_back(job)
        raise RuntimeError

    office.before = refuse
    futures = office.dispatcher.submit([1, 2])
    time.sleep(0.1)
    office.close()
    assert answers(futures) == ["given up: the runner was closed"] * 2


@pytest.mark.timeout(60)
def test_closing_does_not_wait_with_a_worker_that_has_no_candidate() -> None:
    office = Office(2, overlap=True)

    def plan() -> Plan:
        job = office.dispatcher.take()
        if job is None:
            return
        office.dispatcher.settle(job, job.task)
        yield Step("queueing for a device", time.sleep, (1000.0,), 1000.0)

    office.dispatcher._make_plan = plan
    assert answers(office.dispatcher.submit([1])) == [1]
    office.close()


@pytest.mark.timeout(60)
def test_what_is_abandoned_is_not_waited_for() -> None:
    with contextlib.closing(WorkerPool(1)) as pool:

        def plan() -> Plan:
            job = dispatcher.take()
            if job is not None:
                yield Step("sleeping", time.sleep, (1000.0,), 1000.0)

        dispatcher: Dispatcher[Any, Any] = Dispatcher(
            pool, plan, lambda job, reason: f"given up: {reason}", overlap=True
        )
        futures = dispatcher.submit([1, 2])
        dispatcher.close(abandon=True)
        assert answers(futures) == ["given up: the runner was closed"] * 2


def test_a_mistake_in_the_stream_gives_up_what_is_open(office: Office, monkeypatch: Any) -> None:
    stream = office.pool.stream

    def broken(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(office.pool, "stream", stream)
        raise RuntimeError("no stream")

    monkeypatch.setattr(office.pool, "stream", broken)
    assert answers(office.dispatcher.submit([1, 2])) == ["given up: RuntimeError('no stream')"] * 2
    assert answers(office.dispatcher.submit([1, 2])) == [2, 4]


def test_after_an_interrupt_the_next_batch_is_measured() -> None:
    def interrupt(job: Any) -> None:
        office.before = lambda job: None
        raise KeyboardInterrupt

    with contextlib.closing(Office(1, overlap=False)) as office:
        office.before = interrupt
        with pytest.raises(KeyboardInterrupt):
            office.dispatcher.submit([1, 2])
        assert answers(office.dispatcher.submit([3])) == [6]
