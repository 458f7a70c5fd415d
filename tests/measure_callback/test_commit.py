from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tvm_adaptive.errors import MACHINE_FAILURE
from tvm_adaptive.measure_callback import commit
from tvm_adaptive.measure_callback.commit import (
    MAX_FAILED_ROUNDS,
    CommitRound,
    MachineHealth,
    RemoveArtifacts,
)
from tvm_adaptive.values.trial import RECORDED_FAILURE_SEC
from tvm_adaptive.values.trial_log import TrialLog

NO_PROCESS = f"{MACHINE_FAILURE}no process could be started"


def test_a_sound_machine_gives_no_reason_to_end():
    health = MachineHealth()
    assert health.add_round([None, "crash", None]) == ""
    assert health.add_round([]) == ""


def test_a_whole_round_that_the_machine_failed_is_one():
    assert MachineHealth().add_round([NO_PROCESS, NO_PROCESS]) == NO_PROCESS


def test_one_candidate_is_not_a_whole_round():
    health = MachineHealth()
    ends = [bool(health.add_round([NO_PROCESS])) for _ in range(MAX_FAILED_ROUNDS)]
    assert ends == [False] * (MAX_FAILED_ROUNDS - 1) + [True]


def test_so_are_several_rounds_in_a_row_with_a_failure():
    health = MachineHealth()
    rounds = [[None, NO_PROCESS]] * MAX_FAILED_ROUNDS
    assert [bool(health.add_round(each)) for each in rounds] == [False] * 2 + [True]


def test_a_sound_round_between_forgives_them():
    health = MachineHealth()
    for messages in [[None, NO_PROCESS], [None]] * MAX_FAILED_ROUNDS:
        assert health.add_round(messages) == ""


def test_a_round_is_committed_taught_and_identified(monkeypatch):
    monkeypatch.setattr(commit, "TuningRecord", lambda trace, workload, secs, *_: (trace, secs))
    monkeypatch.setattr(commit, "module_key", hash)
    records, taught, log = [], [], TrialLog()
    log.note_timing("1.so", 2e-3, 1e-4)
    context = SimpleNamespace(mod=None, target=None)
    database = SimpleNamespace(commit_workload=lambda mod: mod, commit_tuning_record=records.append)
    model = SimpleNamespace(update=lambda context, candidates, runs: taught.extend(candidates))
    candidates = [
        SimpleNamespace(sch=SimpleNamespace(mod=key, trace=key), args_info=None)
        for key in (1, 2, 3)
    ]
    built = [
        SimpleNamespace(artifact_path="1.so", error_msg=None),
        SimpleNamespace(artifact_path=None, error_msg="it did not compile"),
        SimpleNamespace(artifact_path=None, error_msg=NO_PROCESS),
    ]
    run = [SimpleNamespace(run_secs=[2e-3], error_msg=None)]
    run += [SimpleNamespace(run_secs=None, error_msg=each.error_msg) for each in built[1:]]
    callback = CommitRound._cls([context], database, model, lambda reason: None, log)
    callback.apply(None, 0, candidates, built, run)
    assert records == [(1, [2e-3]), (2, [RECORDED_FAILURE_SEC])]
    assert taught == candidates[:1]
    assert log.get(1).relative_error == pytest.approx(0.05)


def test_a_folder_that_cannot_be_removed_yet_keeps_no_other(tmp_path, monkeypatch):
    """As on NFS, where the library of a worker that runs is only renamed."""
    folders = [tmp_path / name for name in ("held", "second", "third")]
    built = [SimpleNamespace(artifact_path=None, error_msg="it did not compile")]
    for folder in folders:
        folder.mkdir()
        (folder / "kernel.so").write_text("")
        built.append(SimpleNamespace(artifact_path=str(folder / "kernel.so"), error_msg=None))
    remove = os.rmdir

    def remove_others(path, **options):
        if Path(path).name == "held":
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", remove_others)
    RemoveArtifacts._cls().apply(None, 0, [], built, [])
    assert [folder.exists() for folder in folders] == [True, False, False]
