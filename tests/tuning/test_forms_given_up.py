"""Where outputs disagree with other forms in use, everything is computed directly instead."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.journals import MemoryJournal
from tests.tuning.observers import Notes
from tvm_adaptive._tvm import memory_database
from tvm_adaptive.measure_callback.history import History
from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.models.compile import Coverage
from tvm_adaptive.tuning import deploy, tune
from tvm_adaptive.tuning.checks.library import LibraryCheck
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.finals.finalists import Finalists
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.tuning.session import config_after
from tvm_adaptive.values.forms import DIRECT, FormKey

AGREE = Comparison(2e-3, 1e-3, 0.0, 0.0, agree=True)
DISAGREE = Comparison(2e-3, 1e-3, 9.0, 9.0, agree=False, problem="output 0 is wrong")


class Check:
    """A check whose first comparison disagrees, and the second agrees."""

    def __init__(self) -> None:
        self.comparisons = [DISAGREE, AGREE]
        self.given: list[Any] = []  # the databases that were compiled
        self.library = Path("net.so")
        self.libraries: dict[str, Path] = {}
        self.forms: dict[str, FormKey] = {}
        self.coverage = self.shortfall = self.failure = ""
        self.covered = Coverage({}, {}, {})
        self.n_tuned, self.is_compiled = 1, True
        self.is_direct = False

    def __enter__(self) -> Check:
        return self

    def __exit__(self, *_exception: object) -> None:
        """There is nothing to close."""

    def nothing(self) -> None:
        """Do nothing."""

    begin_untuned = measure_untuned = release_device = nothing

    def measure_tuned(self, database: Any) -> Comparison:
        self.given.append(database)
        return self.comparisons[len(self.given) - 1]

    def gives_up_forms(self, comparison: Comparison | None) -> bool:
        self.is_direct |= comparison is DISAGREE
        return comparison is DISAGREE


def test_a_run_decides_anew_without_the_forms(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = FormKey("conv", "winograd")
    progress = RunProgress([TaskProgress("conv", 1.0, best_sec=1e-3, key=key)])
    decisions: list[tuple[bool, float]] = []

    def decide(*_args: Any, is_second: bool = False, **_options: Any) -> Any:
        decisions.append((is_second, progress.tasks[0].best_sec))
        return f"database {len(decisions)}", []

    parts = SimpleNamespace(runner=None, strategy=None, draft=None, close=lambda: None)
    monkeypatch.setattr(tune, "make_parts", lambda _session: parts)
    monkeypatch.setattr(tune, "runner_hooks", lambda _runner: None)
    monkeypatch.setattr(tune, "contexts_of", lambda *_args, **_options: [])
    monkeypatch.setattr(tune, "_plan_reserve", lambda *_args: None)
    monkeypatch.setattr(tune, "_search", lambda *_args, **_options: progress)
    monkeypatch.setattr(tune, "decide", decide)
    session: Any = make_session(journal=MemoryJournal())
    check: Any = Check()
    report = tune._tune_tasks(session, "net", [], check)
    # The second one knows nothing of what the other form took.
    assert decisions == [(False, 1e-3), (True, float("inf"))]
    assert check.given == ["database 1", "database 2"]
    assert report.comparison == AGREE
    (event,) = session.journal.of("report")
    assert event["comparison"]["agree"]


def test_what_is_applied_is_compiled_anew_without_the_forms(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Check()
    databases: list[Any] = []

    def checked_database(*_args: Any) -> Any:
        databases.append(memory_database())
        return databases[-1]

    monkeypatch.setattr(deploy, "tasks_and_check", lambda *_args: ([], check))
    monkeypatch.setattr(deploy, "checked_database", checked_database)
    session: Any = make_session()
    network: Any = SimpleNamespace(name="net")
    compiled = deploy._compiled(session, network, lambda _tasks: [])
    assert compiled == (check, check.library, AGREE)
    assert len(databases) == 2
    assert check.given == databases


def test_what_takes_the_place_of_the_forms_has_to_be_proven_too(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Check()
    check.forms = {"conv": FormKey("conv", DIRECT), "product": FormKey("conv", "winograd")}
    tasks = [SimpleNamespace(weight=1) for _ in check.forms]
    mod: Any = None
    proven: Any = SimpleNamespace(record=object())
    finalists = [
        Finalists(mod, "conv", (proven.record,), 1.0),
        Finalists(mod, "product", (proven.record,), 0.5, proven=proven),
    ]
    monkeypatch.setattr(deploy, "tasks_and_check", lambda *_args: (tasks, check))
    monkeypatch.setattr(deploy, "checked_database", lambda *_args: SimpleDatabase())
    session: Any = make_session()
    network: Any = SimpleNamespace(name="net")
    assert deploy._compiled(session, network, lambda _tasks: finalists, 0.5) is None
    assert len(check.given) == 1  # it was proven with the form


class SimpleDatabase:
    """Holds a record."""

    def get_all_tuning_records(self) -> list[object]:
        return [object()]


@pytest.mark.parametrize(
    ("comparison", "uses_forms", "is_given_up"),
    [
        (DISAGREE, True, True),
        (DISAGREE, False, False),  # nothing would change
        (AGREE, True, False),
        (None, True, False),  # it is not known
    ],
)
def test_forms_are_given_up_where_outputs_disagree_with_some_in_use(
    make_session: Any, comparison: Comparison | None, uses_forms: bool, is_given_up: bool
) -> None:
    session = make_session(journal=MemoryJournal(), observer=Notes())
    with LibraryCheck(session) as check:
        check.uses_forms = uses_forms
        assert check.gives_up_forms(comparison) == check.is_direct == is_given_up
    events = session.journal.of("error")
    assert [event["message"] for event in events] == is_given_up * [DISAGREE.problem]
    assert len(session.observer.notes) == len(events)


def test_what_was_given_up_is_not_tried_again_by_a_resumed_run(make_session: Any) -> None:
    session = make_session(journal=MemoryJournal(), observer=Notes())
    with LibraryCheck(session) as check:
        check.uses_forms = True
        check.gives_up_forms(DISAGREE)
    (given_up,) = session.journal.of("error")
    history = History()
    history.add({"event": "run", "resumed": False})
    assert config_after(history, DEFAULT) is DEFAULT
    history.add({"event": "error", "where": "store", "n_waiting": 1})
    assert config_after(history, DEFAULT) is DEFAULT
    history.add({"event": "error", **given_up})
    history.add({"event": "run", "resumed": True})
    assert not config_after(history, DEFAULT).preparation["forms"]
    history.add({"event": "run", "resumed": False})  # another run in the same folder
    assert config_after(history, DEFAULT) is DEFAULT
