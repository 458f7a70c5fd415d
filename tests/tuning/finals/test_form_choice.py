"""Which forms are checked and deployed, and what happens when one does not pass."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.models.forms.test_alternatives import network_of, relu
from tvm_adaptive import tune_relax
from tvm_adaptive._tvm import json_database
from tvm_adaptive.measure_callback import read_journal
from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.tuning.checks.library import LibraryCheck
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.finals import decision
from tvm_adaptive.tuning.finals.finalists import Finalists
from tvm_adaptive.tuning.finals.form_choice import FormChoice, as_decided
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.values.forms import DIRECT, FormKey

FORMS = {
    "conv": FormKey("conv", DIRECT),
    "input": FormKey("conv", "winograd"),
    "product": FormKey("conv", "winograd"),
}


def finalists_of(**seconds: float | None) -> list[Finalists]:
    found = []
    for name, sec in seconds.items():
        records: Any = () if sec is None else (object(),)
        found.append(Finalists(None, name, records, sec or 0.0))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("chosen", "proven", "left"),
    [
        ("winograd", ("input", "product"), ["input", "other", "product"]),
        ("winograd", ("input",), ["conv", "input", "other", "product"]),  # refuted since
        (DIRECT, ("conv", "input", "product"), ["conv", "other"]),
        ("another", ("input", "product"), ["conv", "input", "other", "product"]),
    ],
)
def test_what_a_run_has_decided_on_is_deployed_though_another_form_was_timed_faster(
    chosen: str, proven: tuple[str, ...], left: list[str]
) -> None:
    found: Any = [
        dataclasses.replace(each, proven=object() if each.name in proven else None)
        for each in finalists_of(other=1.0, conv=1.0, input=2.0, product=2.0)
    ]
    decided = as_decided(found, FORMS, {"conv": chosen})
    assert sorted(each.name for each in decided if each.records) == left


def test_a_draft_stays_where_a_step_of_another_form_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decision, "work_of", lambda mod: mod)
    found: Any = finalists_of(other=None, conv=None, input=None, product=None)
    contexts: Any = [SimpleNamespace(mod=work) for work in (9.0, 6.0, 1.0, 4.0)]
    progress: Any = SimpleNamespace(tasks=[SimpleNamespace(weight=1.0, n_trials=0)] * 4)
    check: Any = SimpleNamespace(forms=FORMS, is_direct=False)
    wanted: list[list[int]] = []

    def add_drafts(choice: FormChoice) -> None:
        gaps = [i for i in range(4) if choice.used[i] and not choice.finalists[i].records]
        wanted.append(gaps)
        if len(wanted) == 1:  # there is time for one
            drafted: Any = dataclasses.replace(choice.finalists[0], records=(object(),))
            choice.finalists[0] = drafted

    choice = decision._choose_forms(found, contexts, progress, check, add_drafts=add_drafts)
    assert wanted == [[0, 2, 3], [1]]
    assert choice.finalists[0].records


def reports_of(*winners: Any) -> Any:
    return {index: SimpleNamespace(winner=winner) for index, winner in enumerate(winners)}


def test_a_missing_draft_of_one_part_leaves_the_forms_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decision, "work_of", lambda mod: mod)
    names = [f"{name}{part}" for part in "AB" for name in ("conv", "input", "product")]
    forms = {
        name: FormKey(name[-1], DIRECT if name.startswith("conv") else "winograd") for name in names
    }
    found: Any = finalists_of(**dict.fromkeys(names[:-1]), productB=2.0)
    contexts: Any = [SimpleNamespace(mod=work) for work in (6.0, 1.0, 4.0, 6.0, 1.0, 4.0)]
    progress: Any = SimpleNamespace(tasks=[SimpleNamespace(weight=1.0, n_trials=0)] * 6)
    check: Any = SimpleNamespace(forms=forms, is_direct=False)

    def add_drafts(choice: FormChoice) -> None:
        for i, each in enumerate(choice.finalists):
            if choice.used[i] and not each.records and names[i] != "inputA":  # has no schedule
                drafted: Any = dataclasses.replace(each, records=(object(),))
                choice.finalists[i] = drafted

    choice = decision._choose_forms(found, contexts, progress, check, add_drafts=add_drafts)
    assert choice.used == [True, False, False, False, True, True]
    assert choice.is_complete


def test_only_the_fastest_form_has_finalists() -> None:
    choice = FormChoice.of(finalists_of(other=1.0, conv=3.0, input=0.5, product=2.0), FORMS)
    assert choice.used == [True, False, True, True]
    assert [bool(each.records) for each in choice.finalists] == choice.used
    assert choice.of_other_forms == [2, 3]
    # A play-off's worth is its share of what the network takes with these forms.
    assert [each.importance_sec for each in choice.finalists] == [1.0, 0.0, 0.5, 2.0]


def test_what_is_not_used_needs_no_play_off() -> None:
    found = [
        dataclasses.replace(each, is_proven=True)
        for each in finalists_of(conv=3.0, input=0.5, product=2.0)
    ]
    assert [each.is_proven for each in FormChoice.of(found, FORMS).finalists] == [False, True, True]


def test_a_form_without_all_records_is_not_used() -> None:
    choice = FormChoice.of(finalists_of(conv=3.0, input=0.5, product=None), FORMS)
    assert choice.used == [True, False, False]
    assert choice.of_other_forms == []


def test_a_form_with_a_draft_counts_as_its_work_lets_expect() -> None:
    found = finalists_of(conv=3.0, input=None, product=2.0)
    works = {0: 6.0, 1: 1.0, 2: 4.0}
    # Half a second for each, and half as much again for a draft.
    choice = FormChoice.of(found, FORMS, works)
    assert choice.used == [False, True, True]
    assert not choice.is_complete
    assert FormChoice.of(found, FORMS, works | {1: 2.0}).used == [True, False, False]
    # A task of which trials failed has no draft.
    del works[1]
    assert FormChoice.of(found, FORMS, works).used == [True, False, False]


def test_without_any_record_the_form_with_the_least_work_is_used() -> None:
    found = finalists_of(conv=None, input=None, product=None)
    assert FormChoice.of(found, FORMS, {0: 6.0, 1: 1.0, 2: 4.0}).used == [False, True, True]
    assert FormChoice.of(found, FORMS, {0: 5.0, 1: 1.0, 2: 4.0}).used == [True, False, False]


def test_where_a_form_does_not_pass_the_direct_one_is_used() -> None:
    choice = FormChoice.of(finalists_of(conv=3.0, input=0.5, product=2.0), FORMS)
    assert choice.without_unchecked(reports_of(None, object(), object())) is choice
    left = choice.without_unchecked(reports_of(None, object(), None))
    assert left.used == [True, False, False]
    assert len(left.finalists[0].records) == 1


def test_where_a_form_does_not_pass_the_fastest_one_that_is_proven_is_used() -> None:
    proven: Any = object()
    forms = FORMS | {"tile": FormKey("conv", "tiled")}
    found = [
        each if each.name == "conv" else dataclasses.replace(each, proven=proven)
        for each in finalists_of(other=1.0, conv=1.0, input=1.0, product=2.0, tile=4.0)
    ]
    choice = FormChoice.of(found, forms)
    assert choice.used == [True, True, False, False, False]
    nothing_passed = reports_of(None, None, None, None, None)
    left = choice.without_unchecked(nothing_passed)
    assert left.used == [True, False, True, True, False]
    assert [bool(each.records) for each in left.finalists] == [True] * 5
    assert choice.without_unchecked(nothing_passed, only_direct=True) is choice
    # A form counts as proven with all its tasks.
    found[3] = dataclasses.replace(found[3], proven=None)
    left = FormChoice.of(found, forms).without_unchecked(nothing_passed)
    assert left.used == [True, False, False, False, True]
    # Forms that were given up take no place.
    direct = FormChoice.of(found, forms, is_direct=True)
    assert direct.without_unchecked(nothing_passed) is direct


def test_forms_that_were_given_up_are_not_used_whatever_they_take() -> None:
    found = finalists_of(conv=3.0, input=0.5, product=2.0)
    assert FormChoice.of(found, FORMS).used == [False, True, True]
    assert FormChoice.of(found, FORMS, is_direct=True).used == [True, False, False]
    missing = finalists_of(conv=None, input=0.5, product=2.0)
    assert FormChoice.of(missing, FORMS, {0: 6.0}, is_direct=True).used == [True, False, False]


def test_the_journal_says_what_was_tried_and_chosen() -> None:
    choice = FormChoice.of(finalists_of(conv=3.0, input=0.5, product=2.0), FORMS)
    tasks = [TaskProgress(name, 1.0, n, key=FORMS[name]) for n, name in enumerate(FORMS)]
    assert choice.as_fields(RunProgress(tasks)) == {
        "conv": {
            "chosen": "winograd",
            "forms": {
                "direct": {"ms": 3000.0, "n_trials": 0},
                "winograd": {"ms": 2500.0, "n_trials": 3},
            },
        }
    }


def test_forbidden_forms_are_not_used_any_more() -> None:
    seconds = {"conv": 3.0, "input": 0.5, "product": 2.0}
    tasks = [TaskProgress(name, 1.0, best_sec=seconds[name], key=FORMS[name]) for name in FORMS]
    progress = RunProgress(tasks)
    assert (progress.weighted_sec, len(progress.used_tasks)) == (2.5, 2)
    progress.forbid_forms()
    assert (progress.weighted_sec, len(progress.used_tasks)) == (3.0, 1)
    assert math.isinf(progress.tasks[2].best_sec)


@pytest.mark.slow
def test_a_network_is_tuned_checked_and_compiled_in_its_fastest_forms(tmp_path: Path) -> None:
    network = network_of(relu, (1, 64, 56, 56), 64)
    quick = DEFAULT.replace(store="none", peers="")
    report = tune_relax(network.mod, work_dir=tmp_path, trials=120, seed=0, config=quick)
    assert report.comparison is not None
    assert report.comparison.agree
    (event,) = [e for e in read_journal(tmp_path / "journal.jsonl") if e["event"] == "forms"]
    (group,) = event["groups"].values()
    tried = {name: form["ms"] for name, form in group["forms"].items() if form["ms"] is not None}
    assert group["chosen"] == min(tried, key=tried.__getitem__)
    assert len(tried) > 1
    used = [task for task in report.tasks if task.is_used]
    assert {task.form or "direct" for task in used if task.group} == {group["chosen"]}
    assert all(task.checked == "play-off" for task in used if task.group)
    assert report.weighted_sec == pytest.approx(sum(t.weight * t.best_sec for t in used))
    n_records = len(json_database(tmp_path / "final").get_all_tuning_records())
    assert n_records >= sum(bool(task.group) for task in used)
    assert json.dumps(report.as_fields(), default=str)
    assert np.isfinite(report.weighted_sec)


@pytest.mark.slow
def test_a_resumed_run_keeps_to_the_direct_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gives_up = LibraryCheck.gives_up_forms

    def disagree(check: LibraryCheck, comparison: Comparison | None) -> bool:
        assert comparison is not None
        return gives_up(check, dataclasses.replace(comparison, agree=False, problem="it is wrong"))

    monkeypatch.setattr(LibraryCheck, "gives_up_forms", disagree)
    network = network_of(relu, (1, 64, 56, 56), 64)
    options: Any = {"seed": 0, "config": DEFAULT.replace(store="none", peers="")}
    for trials in (120, 140):
        report = tune_relax(
            network.mod, work_dir=tmp_path, trials=trials, resume=trials == 140, **options
        )
        assert not any(task.form for task in report.tasks if task.is_used)
    events = read_journal(tmp_path / "journal.jsonl")
    assert [e.get("where") for e in events if e["event"] == "error"] == ["forms"]
