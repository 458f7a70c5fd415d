from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers.models import MODELS, OTHERS
from benchmarks.peers.picture import picture
from benchmarks.peers.table import row_of, table
from tvm_adaptive.models.frontend import PEERS
from tvm_adaptive.tuning.deploy import APPLY_FILE
from tvm_adaptive.tuning.manifest import MANIFEST_FILE
from tvm_adaptive.tuning.outcome import Comparison, PeerTiming

SVG = "{http://www.w3.org/2000/svg}"
PAGE = Path(command.__file__).parents[1] / "README.md"
# Folders of the page's tables; `peers-60s` has an earlier state.
KEPT = (
    *("peers-60s-intel", "peers-60s-avx2", "peers-600s-intel", "peers-600s-avx2"),
    *("others-60s", "others-60s-avx2"),
)


def comparison(tuned_secs: list[float], ort_secs: list[float]) -> dict[str, Any]:
    peer = PeerTiming(
        "ort", "ONNX Runtime", 2, tuple(ort_secs), tuple(tuned_secs), 1e-6, 1e-6, True
    )
    slow = dataclasses.replace(peer, name="openvino", secs=tuple(10 * sec for sec in ort_secs))
    found = Comparison(ort_secs[0], tuned_secs[0], 1e-6, 1e-6, True, "ONNX", (peer, slow))
    return dataclasses.asdict(found)


def fields(**changes: Any) -> dict[str, Any]:
    timings = [comparison([1e-3, 2e-3], [2e-3, 3e-3]), comparison([1e-3, 1e-3], [1e-3, 2e-3])]
    return {"model": "net", "budget_sec": 60.0, "seed": 0, "timings": timings, **changes}


def test_rounds_of_all_timings_count() -> None:
    row = row_of(fields())
    assert (row.n_rounds, row.tuned_ms) == (4, 1.0)
    assert row.peers["ort"].speedup == 1.75
    assert "| 1.75 (1.00 to 2.00) |" in table([row])
    assert row.best_ratio == 1.75
    assert row.agrees


def test_the_table_has_the_mean_and_what_failed() -> None:
    rows = [row_of(fields()), row_of(fields(model="other")), row_of(fields(error="no memory"))]
    text = table(rows)
    assert "Geometric mean of the best peer's ratio: 1.75 (2 models)." in text
    assert "| net | 60 s | no memory |" in text
    assert "17.50 (10.00 to 20.00)" in text


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


@pytest.mark.parametrize("folder", KEPT)
def test_the_page_has_the_lines_of_the_rows_that_are_kept(folder: str) -> None:
    page = [cells_of(line) for line in PAGE.read_text().splitlines() if line.startswith("|")]
    path = PAGE.parent / "results" / folder / command.ROWS_FILE
    kept = command.read_rows(path, "model", "budget_sec", "seed")
    assert len(kept) >= 7
    for row in map(row_of, kept.values()):
        model, _, ours, *peers, best, _ = cells_of(table([row]).splitlines()[2])
        if folder.startswith("others"):  # files of ONNX, which PyTorch does not read
            peers = [each or "cannot open it" for each in peers[:2]]
        line = [ours, *peers, best, f"{row.max_abs:.1g}"]
        assert line in [each[-len(line) :] for each in page if each[0].split(" ")[0] == model]


def test_the_picture_has_a_mark_per_framework_left_and_right_of_equal(tmp_path: Path) -> None:
    rows = [fields(), fields(model="slow & old", timings=[comparison([4e-3], [2e-3])])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*rows, fields(seed=1)])))
    target = tmp_path / "peers.svg"
    assert command.main([str(tmp_path), "--budget", "60s", "--picture", str(target)]) == 0
    root = ElementTree.fromstring(target.read_text())
    marks = {
        mark[0].text: float(mark.attrib["cx"]) for mark in root.iter(f"{SVG}circle") if len(mark)
    }
    one = next(line for line in root.iter(f"{SVG}line") if line.attrib["class"] == "one")
    behind = marks["slow & old: 0.50 x as fast as ONNX Runtime"]
    assert behind < float(one.attrib["x1"]) < marks["net: 1.75 x as fast as ONNX Runtime"]
    with pytest.raises(ValueError, match="at least one model"):
        picture([row_of(fields(error="no memory"))])


class Commands:
    """Stands in for the package's commands: each deploys what was timed."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []
        self.code = 0
        self.held: list[dict[str, str]] = []  # events of apply

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if "tvm_adaptive" not in command:  # git, for the description of the machine
            return subprocess.CompletedProcess(command, 1, "", "")
        arguments = command[3:]
        self.seen.append(arguments)
        if arguments[0] == "apply":
            out = Path(arguments[arguments.index("--out") + 1])
            out.mkdir(parents=True, exist_ok=True)
            found = {"comparison": comparison([1e-3], [2e-3])}
            (out / MANIFEST_FILE).write_text(json.dumps(found))
            events = [{"event": "playoff"}, {"event": "journal"}, *self.held]
            lines = "".join(json.dumps({"time_sec": 0.0, **each}) + "\n" for each in events)
            (out / APPLY_FILE).write_text(lines)
        return subprocess.CompletedProcess(command, self.code, "", "a line\nthe reason")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    found = Commands()
    monkeypatch.setattr(command.subprocess, "run", found)
    model = dataclasses.replace(MODELS[0], write=lambda path: path.write_text("a model"))
    monkeypatch.setattr(command, "MODELS", (model,))
    return found


def test_a_model_is_tuned_once_and_timed_three_times(tmp_path: Path, commands: Commands) -> None:
    for _ in range(2):  # the second command has nothing to do
        assert command.main([str(tmp_path), "--budget", "60s"]) == 0
    assert [each[0] for each in commands.seen] == ["tune", "apply", "apply", "apply"]
    tune = commands.seen[0]
    assert tune[tune.index("--input-shape") + 1] == "x=1x3x320x320"
    assert tune[tune.index("--store") + 1] == "none"
    ((_, row),) = command.read_rows(tmp_path / command.ROWS_FILE, "model").items()
    assert row_of(row).n_rounds == 3


def test_a_run_that_was_cut_short_is_resumed(tmp_path: Path, commands: Commands) -> None:
    work_dir = tmp_path / "ppocr_det-60s-0"
    work_dir.mkdir()
    (work_dir / "journal.jsonl").write_text("")
    command.main([str(tmp_path), "--budget", "60s"])
    assert commands.seen[0] == ["tune", "--resume", str(work_dir)]


def test_what_the_run_had_no_time_for_is_not_timed(
    tmp_path: Path, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.held = [{"event": "playoff"}]
    command.main([str(tmp_path), "--budget", "60s"])
    assert "apply held 1 play-offs" in capsys.readouterr().out


def test_a_framework_that_fails_is_named(
    tmp_path: Path, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.held = [
        {"event": "error", "where": f"peer {PEERS[name].framework}", "message": message}
        for name, message in (("openvino", "it was killed"), ("torch", "it does not read them"))
    ]
    command.main([str(tmp_path), "--budget", "60s"])
    printed = capsys.readouterr().out
    assert f"- ppocr_det, {PEERS['openvino'].framework}: it was killed" in printed
    assert "it does not read them" not in printed


def test_a_failure_is_a_row(
    tmp_path: Path, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.code = 2
    command.main([str(tmp_path), "--budget", "60s"])
    assert "tune ended with 2: the reason" in capsys.readouterr().out


def test_models_have_names_of_their_own() -> None:
    assert len(MODELS) == 15
    assert len({each.name for each in (*MODELS, *OTHERS)}) == len(MODELS) + len(OTHERS)


@pytest.mark.parametrize("named", [["--others"], ["--models", OTHERS[0].name]])
def test_other_models_are_timed_where_they_are_named(
    named: list[str], tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dataclasses.replace(OTHERS[0], write=lambda path: path.write_text("a model"))
    monkeypatch.setattr(command, "OTHERS", (model,))
    command.main([str(tmp_path), "--budget", "60s", *named])
    (row,) = command.read_rows(tmp_path / command.ROWS_FILE, "model").values()
    assert row["model"] == model.name
