"""The RPC runner against TVM's own tracker and servers, on loopback."""

from __future__ import annotations

import ctypes
import signal
import sys
import time

import cloudpickle
import pytest
from tvm.s_tir.meta_schedule.runner import RPCConfig, Runner, RunnerInput

from tvm_adaptive.errors import InvalidOptionError, is_out_of_time
from tvm_adaptive.measure_callback.journal import Journal, read_journal
from tvm_adaptive.runner.rpc.runner import AdaptiveRPCRunner
from tvm_adaptive.values.trial import Timing
from tvm_adaptive.values.trial_log import TrialLog

pytestmark = pytest.mark.rpc

# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def make_runner(farm):
    runners = []

    def make(**options):
        runners.append(farm.connect(n_devices=2, **options))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def results(runner, inputs):
    return [future.result() for future in Runner.run(runner, inputs)]


def hang_or_measure(artifact_path, device_type, args_info, options):
    from tvm_adaptive.runner.measure import measure_artifact

    if artifact_path == "hang":
        ctypes.PyDLL(None).sleep(1000)
    if artifact_path == "slow":
        time.sleep(3.0)
        return Timing(1.0, 0.0, 1, 1, "precise", 3.0)
    return measure_artifact(artifact_path, device_type, args_info, options)


def test_a_batch_gets_one_time_each(make_runner, matmul, tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    for result in results(make_runner(journal=journal), [matmul] * 5):
        assert result.error_msg is None
        assert len(result.run_secs) == 1
        assert 1e-7 < float(result.run_secs[0]) < 0.1
    events = [event for event in read_journal(journal.path) if event["event"] == "timing"]
    assert sorted(event["index"] for event in events) == [0, 1, 2, 3, 4]
    assert len({event["board"] for event in events}) <= 2


@pytest.mark.slow
def test_a_missing_artifact_and_a_hang_cost_one_result_each(make_runner, matmul):
    inputs = [RunnerInput(path, "cpu", []) for path in ("missing.tar", "hang")]
    runner = make_runner(measure=hang_or_measure, timeout_sec=10.0)
    missing, hang, good = results(runner, [*inputs, matmul])
    assert "missing.tar" in missing.error_msg
    assert "Timeout: timeout: killed after 10 s of running" in hang.error_msg
    assert good.error_msg is None


def test_a_defect_of_a_session_fails_what_is_queued(make_runner, matmul, monkeypatch):
    runner = make_runner()

    def fail(*_):
        raise OverflowError("cannot convert float infinity to integer")

    monkeypatch.setattr(runner._inst, "_use", fail)
    for result in results(runner, [matmul, matmul]):
        assert "could not be used: OverflowError" in result.error_msg


@pytest.mark.slow
def test_queueing_for_a_device_does_not_count(make_runner):
    # Three workers, two devices: the third waits 3 s and may run for 5.5 s only.
    runner = make_runner(measure=hang_or_measure, timeout_sec=5.5, max_workers=3)
    outcomes = results(runner, [RunnerInput("slow", "cpu", [])] * 3)
    assert [outcome.error_msg for outcome in outcomes] == [None] * 3


def test_no_result_is_waited_for_beyond_the_runs_time(make_runner):
    runner = make_runner(measure=hang_or_measure, time_left=lambda: 0.0)
    (outcome,) = results(runner, [RunnerInput("slow", "cpu", [])])
    assert is_out_of_time(outcome.error_msg)


@pytest.fixture
def brief_wait(monkeypatch):
    """Do not wait 10 s for devices that will not come."""
    monkeypatch.setattr("tvm_adaptive.runner.rpc.leased_worker.SERVER_WAIT_SEC", 0.0)


@pytest.mark.usefixtures("brief_wait")
def test_a_key_that_nobody_serves_is_named(farm):
    config = farm.config._replace(tracker_key="none")
    message = (
        f"no server with the key 'none'.*query_rpc_tracker --host 127.0.0.1 --port {farm.port}"
    )
    with pytest.raises(InvalidOptionError, match=message):
        AdaptiveRPCRunner(config)


@pytest.mark.usefixtures("brief_wait")
def test_a_tracker_that_is_not_there_is_named(unused_port):
    port = unused_port
    message = f"127.0.0.1:{port} gives no device.*refused.*query_rpc_tracker"
    with pytest.raises(InvalidOptionError, match=message):
        AdaptiveRPCRunner(RPCConfig("127.0.0.1", port, "board", 1, 10))


def test_an_incomplete_configuration_is_named(monkeypatch):
    monkeypatch.delenv("TVM_TRACKER_HOST", raising=False)
    with pytest.raises(InvalidOptionError, match=r"not complete.*tracker_host"):
        AdaptiveRPCRunner(RPCConfig(None, 1, "board"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_workers": 0}, "max_workers must be at least 1 but got 0"),
        ({"timeout_sec": -1}, "timeout_sec must be above 0 but got -1"),
        ({"timeout_sec": float("inf")}, "timeout_sec must be finite"),
        ({"queue_timeout_sec": 0}, "above 0 but got 0"),
        ({"rule": "best"}, "but got 'best'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(InvalidOptionError, match=message):
        AdaptiveRPCRunner(RPCConfig("127.0.0.1", 1, "board"), **options)


def test_candidates_race_against_the_incumbent(make_runner, matmul, tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    log = TrialLog()
    runner = make_runner(journal=journal, trial_log=log)
    (alone,) = results(runner, [matmul])
    log.batch_facts.incumbent_sec = float(alone.run_secs[0]) / 10
    (raced,) = results(runner, [matmul])
    assert raced.error_msg is None
    timings = [event for event in read_journal(journal.path) if event["event"] == "timing"]
    assert timings[-1]["reason"] == "raced"
    log.identify(str(matmul.artifact_path), 1)
    assert log.get(1).relative_error > 0


def test_in_the_background_the_caller_goes_on(make_runner, matmul):
    runner = make_runner(overlap=True)
    batches = [Runner.run(runner, [matmul] * 3) for _ in range(2)]
    assert not batches[-1][0].done()
    found = [future.result() for batch in batches for future in batch]
    assert [result.error_msg for result in found] == [None] * 6


def test_a_farm_that_loses_a_device_measures_on(farm, make_runner, matmul, tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    runner = make_runner(journal=journal, timeout_sec=10.0)
    first = results(runner, [matmul] * 4)
    (port, process), *_ = farm.servers.items()
    try:
        farm.signal_server(0, signal.SIGKILL)
        later = results(runner, [matmul] * 4)
    finally:
        process.wait()
        farm.start_server(port)
    assert [result.error_msg for result in first + later] == [None] * 8
    events = [event for event in read_journal(journal.path) if event["event"] == "timing"]
    assert {event["board"] for event in events[4:]} == {farm.address(1)}


@pytest.mark.slow
def test_servers_that_die_give_error_results_and_no_hang(matmul, make_farm):
    farm = make_farm(1)
    runner = farm.connect(queue_timeout_sec=5.0)
    (before,) = results(runner, [matmul])
    farm.kill_servers()
    after = results(runner, [matmul] * 6)
    runner.close()
    assert before.error_msg is None
    for result in after:
        assert result.run_secs is None
        assert "no device for 5 s: " in result.error_msg
        assert "gives no device" in result.error_msg
