import json
from pathlib import Path

import pytest

from benchmarks.micro.remembered import batches_of, main, read_tasks
from tests.database.test_store import task, trial
from tvm_adaptive.database.store import RecordStore

# A search that was over long ago, and one that begins with its best and finds nothing better.
FIRST = [4.0, 3.0, None, 2.0, *[2.5] * 96]
SECOND = [2.0, 2.1, *[3.0] * 32]


def test_batches_are_forecast_with_and_without_what_was_before(rng):
    batches = batches_of({"name": "conv", "first_ms": FIRST, "second_ms": SECOND}, rng)
    assert [batch.n_before for batch in batches] == [0, 1]
    for batch in batches:
        assert batch.saved == 0.0
        assert 0.0 < batch.remembering < batch.alone


def test_a_batch_that_was_cut_short_does_not_count(rng):
    short = {"name": "conv", "first_ms": FIRST, "second_ms": SECOND[:18]}
    assert len(batches_of(short, rng)) == 1
    assert batches_of({**short, "second_ms": SECOND[:17]}, rng) == []


def test_what_a_store_holds_can_be_kept_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def of(run, latencies_ms):
        trials = [trial(None if ms is None else ms / 1e3) for ms in latencies_ms]
        return [type(each)(**{**vars(each), "run": run}) for each in trials]

    with RecordStore(tmp_path / "records.db") as store:
        store.add(task(), of("a", FIRST))
        store.add(task(), of("b", SECOND))
        store.add(task(1), of("b", SECOND))  # one run only
    kept = tmp_path / "kept.json"
    assert main([str(tmp_path / "records.db"), "--out", str(kept)]) == 0
    first = capsys.readouterr().out
    (known,) = json.loads(kept.read_text())["tasks"]
    assert known["first_ms"] == pytest.approx(FIRST)
    assert len(read_tasks(kept)) == 1
    assert main([str(kept)]) == 0
    assert capsys.readouterr().out == first
    assert "| second and third | 1 | 0.00% |" in first


def test_a_store_without_second_runs_is_reported(tmp_path: Path) -> None:
    with RecordStore(tmp_path / "records.db") as store:
        store.add(task(), [trial(1e-3)])
    with pytest.raises(SystemExit, match="has two runs"):
        main([str(tmp_path / "records.db")])
