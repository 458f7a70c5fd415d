from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import machine
from benchmarks.machine import describe_machine, describe_noise, write_figure
from benchmarks.winners import cut_database
from tvm_adaptive.values.run_folder import RECORD_FILE, WORKLOAD_FILE


@pytest.mark.parametrize(("n_records", "kept"), [(None, [0, 2, 3]), (2, [0]), (3, [0, 2])])
def test_a_database_is_cut_after_so_many_trials_and_without_failures(
    tmp_path: Path, n_records: int | None, kept: list[int]
) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    copy.mkdir()
    (source / WORKLOAD_FILE).write_text('["workload"]\n')
    seconds = [[0.5], [1e10], [0.25, 0.75], [0.1]]
    records = [[0, [f"trace {n}", each, {}, []]] for n, each in enumerate(seconds)]
    (source / RECORD_FILE).write_text("".join(json.dumps(each) + "\n" for each in records))
    assert cut_database(source, copy, n_records) == len(kept)
    lines = (copy / RECORD_FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [records[n] for n in kept]
    assert (copy / WORKLOAD_FILE).read_text() == '["workload"]\n'


@pytest.mark.parametrize(
    ("n_records", "rank", "kept"), [(None, 2, [0, 2]), (3, 2, [2]), (3, 3, [])]
)
def test_the_next_best_is_what_is_left_without_the_best(
    tmp_path: Path, n_records: int | None, rank: int, kept: list[int]
) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / WORKLOAD_FILE).write_text("")
    seconds = [[0.2], [1e10], [0.5], [0.1]]
    lines = [json.dumps([0, [f"trace {n}", each, {}, []]]) for n, each in enumerate(seconds)]
    (tmp_path / RECORD_FILE).write_text("".join(f"{line}\n" for line in lines))
    assert cut_database(tmp_path, tmp_path / "copy", n_records, rank) == len(kept)
    found = (tmp_path / "copy" / RECORD_FILE).read_text().splitlines()
    assert found == [lines[n] for n in kept]


@pytest.mark.parametrize(("rank", "kept"), [(1, [0, 2]), (2, [0])])
def test_what_computed_something_else_is_no_record(
    tmp_path: Path, rank: int, kept: list[int]
) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / WORKLOAD_FILE).write_text("")
    seconds = (0.3, 0.1, 0.2)
    lines = [json.dumps([0, [f"trace {n}", [sec], {}, []]]) for n, sec in enumerate(seconds)]
    (tmp_path / RECORD_FILE).write_text("".join(f"{line}\n" for line in lines))
    cut_database(tmp_path, tmp_path / "copy", None, rank, [100.00001])
    found = (tmp_path / "copy" / RECORD_FILE).read_text().splitlines()
    assert found == [lines[n] for n in kept]


def test_the_machine_is_described() -> None:
    about = describe_machine()
    assert about["n_processors"] >= 1
    assert about["packages"]["apache-tvm"]
    json.dumps(about)


@pytest.mark.parametrize(("said", "commit"), [("1a2b3c-dirty\n", "1a2b3c-dirty"), ("", "unknown")])
def test_the_commit_is_that_of_the_code_that_ran(
    monkeypatch: pytest.MonkeyPatch, said: str, commit: str
) -> None:
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=said))
    assert describe_machine()["commit"] == commit


def test_a_figure_says_when_and_where_it_was_found(tmp_path: Path) -> None:
    write_figure(tmp_path / "new" / "figure.json", {"rows": [1]})
    found = json.loads((tmp_path / "new" / "figure.json").read_text())
    assert list(found) == ["unix_sec", "machine", "rows"]
    assert found["unix_sec"] > 1.7e9
    assert found["machine"]["commit"]


@pytest.mark.parametrize(("samples", "noisy"), [([1.0, 1.01] * 9, False), ([1.0, 1.3] * 9, True)])
def test_a_wide_spread_is_noise(samples: list[float], noisy: bool) -> None:
    assert describe_noise(samples)["noisy"] is noisy
