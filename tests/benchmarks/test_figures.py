from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.charts import Bars, Chart, Figure, Line
from benchmarks.figures.__main__ import main
from benchmarks.figures.ablation import ablation_by_trials
from benchmarks.figures.gain_cost import gain_cost
from benchmarks.figures.schedulers import Sequential
from benchmarks.figures.table import BENCH, FIGURES, RECORDINGS
from benchmarks.figures.variance import read_runs, variance
from benchmarks.journals import load_bench
from benchmarks.methods import METHODS
from benchmarks.page import make_page, to_html
from benchmarks.plan import RunSpec
from benchmarks.scheduler.recordings import save_recording
from benchmarks.svg import HEIGHT, LEGEND_INSIDE, WIDTH, colour_of, draw, draw_figure, ticks
from tvm_adaptive.task_scheduler.arms import Arm
from tvm_adaptive.testing.recording import Recording, TaskRecording

Spec = Callable[..., RunSpec]
Write = Callable[..., Path]


def task(name: str, weight: float, rng: np.random.Generator, n: int = 64) -> TaskRecording:
    latencies = 1.0 + 4.0 * np.exp(-np.arange(n) / 20.0) * rng.uniform(0.5, 1.5, n)
    latencies[0] = math.nan
    sizes = np.full(n // 16, 16, dtype=np.int64)
    return TaskRecording(
        name, weight, 1e6, latencies, np.full(n, 0.1), sizes, np.full(len(sizes), 1.0)
    )


@pytest.fixture
def recording(rng: np.random.Generator) -> Recording:
    tasks = (task("one", 1.0, rng), task("two", 3.0, rng))
    return Recording("net", tasks, 16, "a machine", "0.27", 0)


def check(figure: Figure) -> None:
    assert figure.panels
    assert figure.caption.endswith(".")
    for panel in figure.panels:
        ElementTree.fromstring(draw(panel))


@pytest.mark.parametrize(
    "name", [name for name, entry in FIGURES.items() if entry.source == RECORDINGS]
)
def test_figures_of_recordings(name: str, recording: Recording) -> None:
    check(FIGURES[name].make([recording]))


@pytest.mark.parametrize("name", [name for name, each in FIGURES.items() if each.source == BENCH])
def test_figures_of_a_benchmark(
    name: str, spec: Spec, write_run: Write, write_bench: Write
) -> None:
    for method in METHODS:
        write_run(spec(method, 0, "resnet18"), [(5.0, None, 32), (10.0, 4.0, 64)], 50.0)
        write_run(spec(method, 1, "resnet18"), [(6.0, 5.0, 32), (11.0, 3.0, 64)], 50.0)
    timed = {f"{method}/{seed}/final": [3.0] for method in METHODS for seed in (0, 1)}
    figure = FIGURES[name].make(load_bench(write_bench(timed, "resnet18")))
    check(figure)
    assert figure.panels[0].title == "resnet18"


def test_the_ablation_names_the_rungs_that_the_benchmark_has(
    spec: Spec, write_run: Write, write_bench: Write
) -> None:
    for method in ("stock", "ladder-4", "ladder-6"):
        write_run(spec(method), [(5.0, 4.0, 32)], 50.0)
    caption = ablation_by_trials(load_bench(write_bench())).caption
    assert "does not have: persistent builder, search on knobs." in caption


@pytest.mark.parametrize("name", ["adatune-2", "adatune-7", "adatune-8"])
def test_a_caption_says_when_the_runs_of_each_method_ended(
    name: str, spec: Spec, write_run: Write, write_bench: Write
) -> None:
    given: dict[str, tuple[float | None, int | None]] = {
        "stock": (3420.0, None),
        "default": (180.0, None),
        "no-race": (None, 640),
    }
    for method, (budget_sec, trials) in given.items():
        each = dataclasses.replace(
            spec(method, 0, "resnet18"), budget_sec=budget_sec, trials=trials
        )
        write_run(each, [(5.0, 4.0, 32)], 50.0)
    caption = FIGURES[name].make(load_bench(write_bench(workload="resnet18"))).caption
    for end in ("stock after 3420 s", "default after 180 s", "no-race after 640 trials"):
        assert end in caption
    assert "same seconds" not in caption
    assert "same prepared graph" not in caption


@pytest.mark.parametrize(("n_panels", "n_columns", "n_rows"), [(1, 1, 1), (4, 2, 2), (5, 3, 2)])
def test_the_panels_of_a_figure_stand_side_by_side(
    n_panels: int, n_columns: int, n_rows: int
) -> None:
    lines = tuple(Line(f"rung {n}", (0.0, 1.0), (1.0, 2.0)) for n in range(LEGEND_INSIDE + 1))
    panels = [Chart(f"panel {n}", "x", "y", lines[: 1 + n]) for n in range(n_panels)]
    svg = ElementTree.fromstring(draw_figure(Figure("name", "Says it.", tuple(panels))))
    places = [each.get("transform") for each in svg if each.tag.endswith("}g")]
    assert places == [
        f"translate({n % n_columns * WIDTH} {n // n_columns * HEIGHT})" for n in range(n_panels)
    ]
    # Only the last panel of five has a legend below it.
    below = 45 if n_panels > LEGEND_INSIDE else 0
    size = float(svg.get("width", "0")), float(svg.get("height", "0"))
    assert size == (n_columns * WIDTH, n_rows * HEIGHT + below)
    assert svg[0].get("fill") == "#fff"


def test_runs_are_read_with_and_without_their_origin(tmp_path: Path) -> None:
    path, runs = tmp_path / "runs.json", {"C2D": [[1.0, 2.0]]}
    for written in (runs, {"unix_sec": 0, "machine": {}, "runs": runs}):
        path.write_text(json.dumps(written))
        assert read_runs(path) == runs


def test_the_variance_of_means_falls_with_their_length(rng: np.random.Generator) -> None:
    figure = variance({"C2D": rng.normal(10.0, 1.0, size=(30, 400)).tolist()})
    check(figure)
    squares = figure.panels[0].lines[0]
    assert squares.x[0] == 1.0
    np.testing.assert_allclose(squares.y[:5], [1 / n for n in squares.x[:5]], rtol=0.15)


def test_shares_of_gain_and_cost_sum_to_a_hundred(recording: Recording) -> None:
    (panel,) = gain_cost([recording]).panels
    assert isinstance(panel, Bars)
    assert [sum(part) for part in panel.parts.values()] == pytest.approx([100.0, 100.0])


def test_one_after_the_other() -> None:
    arms = [Arm(str(n), 1.0, 1.0, np.array([]), 0, 0.0, finished=n == 0) for n in range(3)]
    rng = np.random.default_rng(0)
    assert Sequential().choose(arms, rng).arm == 1
    assert Sequential().choose(arms[:1], rng).arm is None


def test_the_command_makes_what_its_sources_allow(
    tmp_path: Path, recording: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    save_recording(recording, tmp_path / "net.npz")
    arguments = ["dynatune-2", "adatune-6", "--recordings", str(tmp_path / "net.npz")]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "gain-cost.html").read_text().count("<svg") == 1
    ElementTree.fromstring((tmp_path / "out" / "gain-cost.svg").read_text())
    assert "adatune-6: left out, needs --bench" in capsys.readouterr().err
    assert main(["adatune-6", "--out", str(tmp_path / "out")]) == 2


@given(
    st.lists(
        st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True)), min_size=0, max_size=8
    ).filter(lambda pairs: all(abs(v) < 1e9 or not math.isfinite(v) for p in pairs for v in p)),
    st.booleans(),
)
@example([(1.0, 5e-324)], True)
@example([(1.0, 2.3e-308)], True)
def test_any_points_can_be_drawn(pairs: list[tuple[float, float]], log: bool) -> None:
    line = Line("a & <b>", tuple(x for x, _ in pairs), tuple(y for _, y in pairs), steps=True)
    drawn = draw(Chart("t", "x", "y", (line,), log_x=log, log_y=log))
    ElementTree.fromstring(drawn)
    assert "nan" not in drawn.split("</text>", 1)[1]


@pytest.mark.parametrize("n", [0, 1, 8, 9, 30])
def test_no_two_labels_share_a_colour(n: int) -> None:
    colours = colour_of(f"rung {k % n}" for k in range(2 * n))
    assert len(set(colours.values())) == len(colours) == n
    assert all(len(each) == 7 and int(each[1:], 16) >= 0 for each in colours.values())


def test_a_long_legend_stands_below_the_axes() -> None:
    lines = [Line(f"rung {n}", (0.0, 1.0), (1.0, 2.0)) for n in range(LEGEND_INSIDE + 1)]
    for n_lines in (LEGEND_INSIDE, LEGEND_INSIDE + 1):
        svg = ElementTree.fromstring(draw(Chart("t", "x", "y", tuple(lines[:n_lines]))))
        places = [float(e.get("y", "0")) for e in svg.iter() if (e.text or "").startswith("rung")]
        is_below = n_lines > LEGEND_INSIDE
        assert [y > HEIGHT for y in places] == [is_below] * n_lines
        assert max(places) < float(svg.get("height", "0"))


@pytest.mark.parametrize("log", [False, True])
@given(low=st.floats(0.001, 1000), ratio=st.floats(1.05, 1000))
def test_ticks_are_within_the_axis(log: bool, low: float, ratio: float) -> None:
    found = ticks(low, low * ratio, log)
    assert found
    assert all(low * (1 - 1e-6) <= value <= low * ratio * (1 + 1e-6) for value in found)


def test_markdown_becomes_html() -> None:
    html = to_html("| a | b |\n|---|---|\n| **1** | <2> |\n\n- x\n- y\n\ntext")
    assert html == (
        "<table><tr><th>a</th><th>b</th></tr><tr><td><b>1</b></td><td>&lt;2&gt;</td></tr>"
        "</table><ul><li>x</li><li>y</li></ul><p>text</p>"
    )
    page = make_page("A & B", [("Head", "text")])
    assert "<title>A &amp; B</title>" in page
