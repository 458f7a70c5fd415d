"""Whole runs on a farm: nothing is linked, run or timed on this machine."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from benchmarks.loopback_farm import LoopbackFarm
from tvm_adaptive import TuneConfig, tune
from tvm_adaptive.errors import InvalidOptionError, NoDeviceError, WorkerTimeoutError
from tvm_adaptive.measure_callback import read_journal
from tvm_adaptive.models import run_exported
from tvm_adaptive.runner.measure import RANDOM_FILL
from tvm_adaptive.runner.rpc.leased_worker import LeasingPool
from tvm_adaptive.tuning.config import FinishConfig, MeasureConfig, SearchConfig
from tvm_adaptive.tuning.deploy import apply
from tvm_adaptive.workers import pool as pools

# Workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

FACTORY = """
from tvm_adaptive.models import transformer

def make():
    return transformer(sequence=16, layers=1, hidden=32, heads=4, inner=64)
"""


def config_for(farm: LoopbackFarm) -> TuneConfig:
    return TuneConfig(
        runner="adaptive-rpc",
        search=SearchConfig(n_trials_per_round=4),
        measure=MeasureConfig(
            tracker=f"127.0.0.1:{farm.port}", tracker_key=farm.config.tracker_key
        ),
        finish=FinishConfig(top_k=1, max_task_sec=0.5),
        store="none",
    )


@pytest.fixture
def without_tools(make_farm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoopbackFarm:
    """A farm, and a machine that cannot link for it: there are no programs but to pack."""
    farm = make_farm(2, restarts=True)
    farm.connect(n_devices=2).close()
    tools = tmp_path / "tools"
    tools.mkdir()
    for program in ("tar", "gzip"):
        (tools / program).symlink_to(str(shutil.which(program)))
    monkeypatch.setenv("PATH", str(tools))
    return farm


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_network_is_checked_and_linked_where_it_will_run(
    without_tools: LoopbackFarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far_encoder.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    report = tune(
        "far_encoder:make",
        work_dir="run",
        target="cpu",
        trials=30,
        seed=1,
        config=config_for(without_tools),
    )
    sys.modules.pop("far_encoder", None)
    boards = {without_tools.address(index) for index in range(2)}
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    assert not [event for event in events if event["event"] == "error"]
    playoffs = [event for event in events if event["event"] == "playoff"]
    assert {event["board"] for event in playoffs} <= boards
    held = {event["reason"] for event in playoffs} - {"no-record"}  # of too few trials
    assert held
    assert held <= {"separated", "tied", "rounds", "time"}
    (reported,) = (event for event in events if event["event"] == "boards")
    # Kernels of microseconds leave the second one nothing to do.
    assert {board["address"] for board in reported["boards"]} <= boards
    assert (
        sum(board["n_timings"] for board in reported["boards"]) == report.n_trials - report.n_errors
    )
    assert report.comparison is not None
    assert report.comparison.agree
    # These devices are of this machine's kind, so that it can run what they have linked.
    assert report.library == tmp_path / "run" / "far_encoder-make.so"
    image = np.zeros((1, 16, 32), np.float32)
    assert run_exported(report.library, [image])[0].shape == (1, 16, 32)
    applied = apply("run", out_dir="out")
    assert applied.library.name == "far_encoder-make.so"
    assert applied.comparison is not None
    assert applied.comparison.agree


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_function_is_checked_and_linked_where_it_will_run(
    without_tools: LoopbackFarm, tmp_path: Path
) -> None:
    report = tune(
        "te:GMM",
        work_dir=tmp_path,
        target="cpu",
        trials=8,
        seed=1,
        config=config_for(without_tools),
    )
    assert report.comparison is not None
    assert report.comparison.agree
    assert (tmp_path / "main.so").is_file()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_farm_that_goes_leaves_what_was_measured(
    make_farm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    farm = make_farm(2)
    farm.connect(n_devices=2).close()
    config = dataclasses.replace(config_for(farm))
    # The task is tried again after a pause.
    monkeypatch.setattr("tvm_adaptive.runner.rpc.leased_worker.RETRY_PAUSE_SEC", 0.5)
    monkeypatch.setattr("tvm_adaptive.runner.rpc.leased_worker.RETRY_QUEUE_SEC", 2.0)

    class Watcher:
        """Kills the farm when the search has ended."""

        def stage(self, name: str) -> None:
            if name == "play-off":
                farm.kill_servers()

        def round(self, progress: Any, budget: Any) -> None: ...

        def note(self, text: str) -> None:
            notes.append(text)

    notes: list[str] = []
    report = tune(
        "te:GMM",
        work_dir=tmp_path,
        target="cpu",
        trials=8,
        seed=1,
        config=config,
        observer=Watcher(),
    )
    events = read_journal(tmp_path / "journal.jsonl")
    reasons = [event["reason"] for event in events if event["event"] == "playoff"]
    assert reasons == ["error", "error"]
    assert np.isfinite(report.weighted_sec)
    assert report.comparison is None
    assert any("no device could be leased" in note for note in notes)


def test_a_farm_that_is_not_there_ends_a_run_before_it_begins(
    tmp_path: Path, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvm_adaptive.runner.rpc.leased_worker.SERVER_WAIT_SEC", 0.0)
    config = TuneConfig(
        runner="adaptive-rpc",
        measure=MeasureConfig(tracker=f"127.0.0.1:{unused_port}", tracker_key="board"),
        store="none",
    )
    with pytest.raises(InvalidOptionError, match=r"gives no device.*query_rpc_tracker"):
        tune("te:GMM", work_dir=tmp_path, target="cpu", trials=8, config=config)
    assert not list(tmp_path.iterdir())


def where() -> bool:
    from tvm_adaptive.workers import device_session

    device_session.function(RANDOM_FILL)
    return device_session.is_elsewhere()


def fail() -> None:
    raise ArithmeticError("its own fault")


def sleep(seconds: float) -> None:
    import time

    time.sleep(seconds)


@pytest.mark.slow
def test_tasks_run_on_the_same_device(make_farm: Any) -> None:
    farm = make_farm(2, restarts=True)
    farm.connect(n_devices=2).close()
    pool = LeasingPool(farm.config, server=pools.ForkServer(("tvm_adaptive.runner.measure",)))
    assert pool.map(where, [()] * 3, 10.0)[0].value is True
    address = pool.address
    (outcome,) = pool.map(fail, [()], 10.0)
    assert "its own fault" in str(outcome.error)
    (outcome,) = pool.map(sleep, [(60.0,)], 0.5)
    assert isinstance(outcome.error, WorkerTimeoutError)
    (outcome,) = pool.map(where, [()], 10.0)
    assert (outcome.value, pool.address) == (True, address)
    farm.signal_server(list(farm.servers).index(int(address.rpartition(":")[2])), signal.SIGKILL)
    (outcome,) = pool.map(where, [()], 10.0)  # it is tried on the other one
    assert outcome.value is True
    farm.kill_servers()
    pool.close()


class CountingPool(LeasingPool):
    n_leases = 0

    def _lease(self, session_sec: int) -> Any:
        self.n_leases += 1
        return super()._lease(session_sec)


@pytest.mark.slow
def test_without_a_device_nobody_waits_twice(make_farm: Any) -> None:
    farm = make_farm(1)
    farm.connect().close()
    farm.kill_servers()
    pool = CountingPool(farm.config, queue_timeout_sec=6.0)
    first, second = pool.map(where, [()] * 2, 10.0)
    assert isinstance(first.error, NoDeviceError)
    assert str(first.error) == str(second.error)
    assert pool.n_leases == 1
    pool.close()
