from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tvm_adaptive.errors import JournalError
from tvm_adaptive.measure_callback.journal import (
    FORMAT_VERSION,
    Journal,
    NullJournal,
    follow,
    read_journal,
)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    journal = Journal(tmp_path / "journal.jsonl")
    for index in range(3):
        journal.write("timing", index=index, text="Grüße\nzwei Zeilen")
    journal.close()
    return journal.path


def events_of(path: Path) -> list[str]:
    return [event["event"] for event in read_journal(path)]


def test_what_is_written_is_read(written: Path) -> None:
    header, *timings = read_journal(written)
    assert header["event"] == "journal"
    assert header["version"] == FORMAT_VERSION
    assert [timing["index"] for timing in timings] == [0, 1, 2]
    assert {timing["text"] for timing in timings} == {"Grüße\nzwei Zeilen"}
    times = [event["time_sec"] for event in (header, *timings)]
    assert times == sorted(times)
    assert times[0] >= 0


def test_cut_anywhere_loses_at_most_one_line(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    cut = tmp_path / "cut.jsonl"
    for size in range(len(whole) + 1):
        cut.write_bytes(whole[:size])
        complete = whole[:size].count(b"\n")
        # Without its newline, a last line may still be complete.
        assert len(read_journal(cut)) - complete in (0, 1), f"cut after {size} bytes"


def test_cut_anywhere_can_be_continued(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    cut = tmp_path / "cut.jsonl"
    for size in range(len(whole) + 1):
        cut.write_bytes(whole[:size])
        before = events_of(cut)
        journal = Journal(cut)
        journal.write("after")
        journal.close()
        assert events_of(cut) == [*before, "journal", "after"], f"cut after {size} bytes"


def test_a_torn_line_is_ended_with_the_header_or_not_at_all(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = written.read_bytes()
    written.write_bytes(whole[:-5])
    torn = written.read_bytes()
    monkeypatch.setattr("tvm_adaptive.measure_callback.journal.open", FullDisk, raising=False)
    journal = Journal(written)
    assert written.read_bytes() == torn
    monkeypatch.setattr(FullDisk, "is_full", False)
    journal.write("after")
    journal.close()
    monkeypatch.undo()
    assert events_of(written) == ["journal", "timing", "timing", "journal", "after"]


class FullDisk:
    """A file on a disk without space."""

    is_full = True

    def __init__(self, path: Path, mode: str, **options: int) -> None:
        self._file = open(path, mode, **options)  # noqa: SIM115 - closed by the journal

    def write(self, line: bytes) -> int | None:
        return self._file.write(line[:3] if self.is_full else line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Any:
        return self._file

    def __exit__(self, *_error: object) -> None:
        self._file.close()


def test_a_reader_sees_each_line_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("round")
    assert events_of(journal.path) == ["journal", "round"]
    journal.close()


def test_damage_in_the_middle_is_an_error(written: Path) -> None:
    lines = written.read_bytes().split(b"\n")
    lines[1] = lines[1][:10]
    written.write_bytes(b"\n".join(lines))
    with pytest.raises(JournalError, match=r"line 2 is not valid JSON.*remove the damaged line"):
        read_journal(written)


def test_a_last_line_that_is_completed_while_it_is_read_is_no_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = b'{"event":"journal"}\n'
    for torn in (b'{"event":"tas', b'{"event":"tasks"}'):  # the second lacks its newline only
        rest = b'ks"}\n' if torn.endswith(b"tas") else b"\n"
        lines = [(whole, torn), (torn, rest), (rest, b"")]
        monkeypatch.setattr(
            "tvm_adaptive.measure_callback.journal._with_next", lambda _path, lines=lines: lines
        )
        kinds = ["journal"] if torn.endswith(b"tas") else ["journal", "tasks"]
        assert events_of(Path("journal.jsonl")) == kinds


def test_an_event_that_is_not_understood_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    # A line that a kill has torn is no event.
    path.write_text('{"event":"journal"}\n{"event":"mea\n{"event":"journal"}\n{"event":"x"}\n')

    def take(event: dict[str, Any]) -> None:
        if event["event"] == "x":
            raise KeyError("task")

    with pytest.raises(JournalError, match=r"line 4 \(x\) is not what this version writes"):
        follow(path, take)


def test_a_newer_version_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(json.dumps({"event": "journal", "version": FORMAT_VERSION + 1}) + "\n")
    with pytest.raises(JournalError, match="Update tvm_adaptive"):
        read_journal(path)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_lacks_become_null(tmp_path: Path, number: float) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("fit", alone=number, listed=[1.0, number], nested={"deep": (number,)})
    journal.close()
    event = read_journal(journal.path)[-1]
    assert event["alone"] is None
    assert event["listed"] == [1.0, None]
    assert event["nested"] == {"deep": [None]}


def test_values_that_json_lacks_become_text(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("error", where=Path("somewhere"))
    journal.close()
    assert read_journal(journal.path)[-1]["where"] == "somewhere"


def test_an_empty_file_has_no_events(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.touch()
    assert read_journal(path) == []


def test_the_null_journal_takes_anything() -> None:
    NullJournal().write("round", value=object())


def test_a_journal_is_followed_without_reading_it_whole(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for number in range(2000):
        journal.write("timing", index=number, text="x" * 4000)
    journal.close()
    seen = []
    tracemalloc.start()
    follow(path, lambda event: seen.append(event.get("index")))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen == [None, *range(2000)]
    assert peak < path.stat().st_size / 4
