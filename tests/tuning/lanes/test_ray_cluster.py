"""A Ray cluster of several nodes, each a process here, and the loss of one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tvm_adaptive import TuneConfig, tune_tir
from tvm_adaptive._tvm import IRModule, te_workload
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback import read_journal
from tvm_adaptive.tuning.config import FinishConfig, SearchConfig
from tvm_adaptive.tuning.lanes.lanes import RayLanes

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Start a head that does no work and two nodes that do."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_nodes_answer_requests_side_by_side_and_one_that_dies_costs_its_own(
    cluster: Any, make_task: Any
) -> None:
    here = [make_task(seed=seed) for seed in (7, 8)]
    with contextlib.closing(RayLanes(cluster.address)) as lanes:
        assert lanes.n_lanes == 2  # of one processor each: no node has two
        there = [make_task(lanes, seed=seed) for seed in (7, 8)]
        for task in there:
            task.side.begin_next_batch()
        assert [task.round() for task in there] == [task.round() for task in here]
        for task in there:
            task.side.begin_next_batch()
        end_sec = time.monotonic() + 60.0
        while ray.available_resources().get("CPU", 0) and time.monotonic() < end_sec:
            time.sleep(0.01)
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        assert [task.round() for task in there] == [task.round() for task in here]
        assert not [event for task in there for event in task.journal.of("error")]


def test_without_any_node_the_search_goes_on_here(cluster: Any, make_task: Any) -> None:
    here = make_task()
    with contextlib.closing(RayLanes(cluster.address)) as lanes:
        task = make_task(lanes)
        for node in cluster.list_all_nodes()[1:]:
            cluster.remove_node(node, allow_graceful=False)
        assert task.round() == here.round()
        (error,) = task.journal.of("error")
        assert "is left" in error["message"]


def test_a_run_goes_on_without_a_node(cluster: Any, tmp_path: Path) -> None:
    class Killer:
        """Removes a node in the middle of the search."""

        is_done = False

        def stage(self, name: str) -> None: ...

        def round(self, progress: Any, budget: Any) -> None:
            if progress.n_trials >= 12 and not self.is_done:
                self.is_done = True
                cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)

        def note(self, text: str) -> None: ...

    killer = Killer()
    mod = IRModule(
        {name: te_workload(what)["main"] for name, what in (("one", "GMM"), ("two", "C1D"))}
    )
    config = TuneConfig(
        search=SearchConfig(n_trials_per_round=4, ray=cluster.address),
        finish=FinishConfig(top_k=1, max_task_sec=0.5),
        store="none",
    )
    report = tune_tir(mod, work_dir=tmp_path, trials=40, seed=1, config=config, observer=killer)
    assert killer.is_done
    assert (report.n_trials, report.n_errors) == (40, 0)
    assert report.comparison is not None
    assert report.comparison.agree
    records = (tmp_path / "database_tuning_record.json").read_text().splitlines()
    assert len(records) == 40
    errors = [e for e in read_journal(tmp_path / "journal.jsonl") if e["event"] == "error"]
    assert errors == []


def test_a_cluster_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidOptionError, match=r"ray status --address 127\.0\.0\.1:1"):
        RayLanes("127.0.0.1:1")
