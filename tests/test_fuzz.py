"""Whatever is in a file, reading it ends well or with one clear error of ours."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tvm_adaptive.errors import AdaptiveError, JournalError
from tvm_adaptive.measure_callback.history import read_history
from tvm_adaptive.measure_callback.journal import read_journal
from tvm_adaptive.report import read_run, write_report
from tvm_adaptive.tuning.inspect import shown_tasks
from tvm_adaptive.tuning.resume import resume

KINDS = ["journal", "run", "model", "tasks", "slot", "slot-end", "round", "build", "timing"]
KINDS += ["forecast", "measured", "untuned", "stage", "comparison", "report", "recalled", "starter"]
FIELDS = ["time_sec", "version", "task", "tasks", "weight", "flop", "latencies_ms", "seconds"]
FIELDS += ["errors", "config", "what", "input_shapes", "interrupted", "weighted_ms", "stage"]
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
events = st.fixed_dictionaries(
    {"event": st.sampled_from(KINDS)}, optional=dict.fromkeys(FIELDS, values)
)
READERS: list[Callable[[Path], Any]] = [
    lambda folder: read_journal(folder / "journal.jsonl"),
    lambda folder: read_history(folder / "journal.jsonl"),
    read_run,
    shown_tasks,
    lambda folder: write_report([read_run(folder)], folder / "report.html"),
]
quick = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        # The script of several MB is the same in each page.
        patch.setattr("tvm_adaptive.report.page._plotly", lambda: "")
        yield tmp_path_factory.mktemp("fuzz")


def read_all(folder: Path) -> None:
    for read in READERS:
        with contextlib.suppress(AdaptiveError):
            read(folder)


@quick
@given(content=st.binary(max_size=300))
def test_journals_of_bytes(content: bytes, folder: Path) -> None:
    (folder / "journal.jsonl").write_bytes(content)
    read_all(folder)


@quick
@given(lines=st.lists(values | events, max_size=6))
@example(lines=[{"event": "tasks", "tasks": [None]}])
@example(lines=[{"event": "comparison", "peers": 7}])
@example(lines=[{"event": "recalled", "n_trials": 7}])
@example(lines=[{"event": "comparison", "time_sec": 1}])
@example(lines=[{"event": "measured", "task": "a", "latencies_ms": [0]}])
def test_journals_of_json(lines: list[Any], folder: Path) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "journal.jsonl").write_text(text)
    read_all(folder)


@pytest.mark.parametrize("line", ["7", "null", "[]", '{"event":7}', "{}", "[" * 100_000])
def test_a_line_that_is_no_event_is_named(line: str, folder: Path) -> None:
    (folder / "journal.jsonl").write_text(f'{{"event":"journal"}}\n{line}\n{{"event":"x"}}\n')
    with pytest.raises(JournalError, match="line 2"):
        read_journal(folder / "journal.jsonl")


def test_an_event_that_lacks_something_is_named(folder: Path) -> None:
    (folder / "journal.jsonl").write_text('{"event":"journal"}\n{"event":"measured"}\n')
    for read in (read_run, lambda path: read_history(path / "journal.jsonl")):
        with pytest.raises(JournalError, match=r"line 2 \(measured\)"):
            read(folder)


@quick
@given(run=st.dictionaries(st.sampled_from([*FIELDS, "target", "seed"]), values))
def test_what_cannot_be_resumed_says_so(run: dict[str, Any], folder: Path) -> None:
    reported = [
        {"event": "journal"},
        {"event": "run", **run},
        {"event": "model", "what": "te:XYZ", "input_shapes": {}},
    ]
    (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in reported))
    with pytest.raises(AdaptiveError):
        resume(folder)
