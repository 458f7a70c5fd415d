"""Which function a difference comes from."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.injection import without_bodies
from tests.tuning.checks.shared import Answer, Clock, session_in, tuned
from tvm_adaptive._tvm import (
    IRModule,
)
from tvm_adaptive.errors import (
    WorkerDiedError,
)
from tvm_adaptive.measure_callback import read_journal
from tvm_adaptive.models import Network, extract, prepare
from tvm_adaptive.models.compare_calls import ComparedCalls
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.checks import difference, functions, peers
from tvm_adaptive.tuning.checks import network as network_check
from tvm_adaptive.tuning.checks.network import NetworkCheck

pytestmark = pytest.mark.usefixtures("brief_timings")


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_disagreement_names_the_place_and_the_function(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch, is_timed: bool
) -> None:
    tuned_names = []

    def with_fault(*args: Any, **options: Any) -> Any:
        mod, coverage = schedule_network(*args, **options)
        (name,) = coverage.tuned
        tuned_names.append(name)
        variable = mod.get_global_var(name)
        idle = without_bodies(IRModule({variable: mod[name]}))
        return IRModule({**dict(mod.functions), variable: idle[name]}, attrs=mod.attrs), coverage

    schedule_network = network_check.schedule_network
    with session_in(tmp_path, Budget()) as session:
        prepared, database = tuned(network, session)
        task_name = extract(prepared, session.target)[0].task_name
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            monkeypatch.setattr(network_check, "schedule_network", with_fault)
            # What was in memory before must not be what is expected.
            assert check._before is not None
            check._before.outputs[0][0, 3, 5] += 100.0
            if not is_timed:
                monkeypatch.setattr(peers.Rivals, "time", lambda *_: [])
            comparison = check.measure_tuned(database)
    assert comparison is not None
    assert not comparison.agree
    assert math.isfinite(comparison.after_sec) == is_timed
    assert re.search(r"^output 0: \d+ of 512 values are wrong, first at \[0, ", comparison.problem)
    named = f"the first function whose outputs differ is {tuned_names[0]} (task {task_name}): "
    assert named in comparison.problem
    (event,) = [
        each for each in read_journal(tmp_path / "journal.jsonl") if each["event"] == "comparison"
    ]
    assert event["problem"] == comparison.problem


@pytest.mark.parametrize(
    ("pool", "left_sec", "text"),
    [
        (Answer(), 0.5, "no time was left to compare the functions one by one"),
        (Answer(ComparedCalls()), 20.0, "no function alone differs: small differences add up"),
        (Answer(error=WorkerDiedError("it crashed")), 20.0, "one by one: it crashed"),
        (
            Answer(ComparedCalls(problems={"f": "output 0 is wrong", "g": "output 1 is wrong"})),
            20.0,
            "differ is f (not tuned): output 0 is wrong",
        ),
        (Answer(ComparedCalls(unclear={"f": "one is wrong"})), 20.0, "(not tuned): one is wrong"),
    ],
)
def test_the_search_for_a_function_costs_no_more_than_its_part_of_the_message(
    make_session: Any, network: Network, pool: Answer, left_sec: float, text: str
) -> None:
    session = make_session(budget=Budget(left_sec, Clock()))
    builds = (("untuned.so", "net.so"), [], "cpu")

    def compare() -> ComparedCalls:
        return functions.compare_builds(session, pool, builds, {}, rtol=1e-3, most_sec=120.0)

    prepared = prepare(network, session.target)
    found = difference.source_of_difference(session, compare, prepared, tuned=())
    assert text in found
    assert pool.limits_sec == ([] if left_sec < 1 else [left_sec])
