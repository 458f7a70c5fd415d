"""Draw what users see of a run: the live screen of a terminal, and the report in a browser.

    python -m benchmarks.screens screens --run runs/net --killed runs/other

The screen is that of the first half of a run, 80 and 140 columns wide, light and dark (SVG). The
report is drawn of the run, of one that was killed, of both together, and of 20,000 trials that
repeat those of the run; for these, Chromium is needed (PNG). Without ``--run``, the kept run of
``tvm-adaptive report --demo`` is taken.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME, TerminalTheme

from tvm_adaptive.measure_callback.journal import JOURNAL_FILE, follow
from tvm_adaptive.report import read_run, write_report
from tvm_adaptive.report.demo import unpack_demo
from tvm_adaptive.report.history import RunHistory
from tvm_adaptive.report.live import screen
from tvm_adaptive.tuning.budget import Budget

WIDTHS = (80, 140)
THEMES: dict[str, TerminalTheme] = {"light": DEFAULT_TERMINAL_THEME, "dark": SVG_EXPORT_THEME}
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
# Of the seconds of the run, what has passed on the screen.
_SHARE_GONE = 0.5
_MANY_TRIALS = 20_000
# Pixels: a column of text and half of the page.
_WINDOW = (1040, 1600)
_CHROMIUM_SEC = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.screens", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--killed", type=Path, metavar="RUN_DIR")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = options.run or _unpacked(Path(folder))
        for width in WIDTHS:
            for name, theme in THEMES.items():
                path = options.out / f"screen-{width}-{name}.svg"
                path.write_text(screen_svg(run, width, theme), encoding="utf-8")
                print(path)
        draw_reports(run, options.killed, options.out, Path(folder))
    return 0


def screen_svg(run: Path, width: int, theme: TerminalTheme) -> str:
    """Return the live screen of a run's first half, so many columns wide."""
    budget_sec = float(read_run(run).run["budget_sec"])
    now_sec = _SHARE_GONE * budget_sec
    history = RunHistory(name=run.name, keeps_all=False)
    follow(run / JOURNAL_FILE, lambda event: _add_until(history, event, now_sec))
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True)
    budget = Budget(budget_sec, clock=lambda: 0.0, spent_sec=now_sec)
    console.print(screen(history, budget, "search"))
    text = console.export_svg(title="tvm-adaptive tune", theme=theme)
    return _FONT_FACE.sub("", text)  # which would be fetched from a network


def draw_reports(run: Path, killed: Path | None, out: Path, folder: Path) -> None:
    """Write the reports of a run, of a killed one, of both, and of many trials, and draw them."""
    found = {"report": [read_run(run)], "report-20000": [many_trials(run)]}
    if killed is not None:
        found["report-killed"] = [read_run(killed)]
        found["report-two"] = [read_run(run), read_run(killed)]
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("reports are not drawn: there is no chromium", file=sys.stderr)
    for name, histories in found.items():
        page = write_report(histories, folder / f"{name}.html")
        for theme in THEMES if chromium is not None else ():
            path = out / f"{name}-{theme}.png"
            command = [str(chromium), "--headless", "--no-sandbox", "--disable-gpu"]
            command += [f"--user-data-dir={folder / 'profile'}", f"--screenshot={path}"]
            command += [f"--window-size={_WINDOW[0]},{_WINDOW[1]}", "--hide-scrollbars"]
            # As Chromium counts them.
            scheme = 0 if theme == "dark" else 1
            command += [f"--blink-settings=preferredColorScheme={scheme}"]
            command += ["--virtual-time-budget=10000", page.as_uri()]
            subprocess.run(command, check=True, capture_output=True, timeout=_CHROMIUM_SEC)
            print(path)


def many_trials(run: Path) -> RunHistory:
    """Return a run with its trials repeated until there are many."""
    history = read_run(run)
    n_times = -(-_MANY_TRIALS // max(1, len(history.trials)))
    history.trials = (history.trials * n_times)[:_MANY_TRIALS]
    return history


def _add_until(history: RunHistory, event: dict[str, object], now_sec: float) -> None:
    if float(str(event.get("time_sec") or 0.0)) <= now_sec:
        history.add(event)


def _unpacked(folder: Path) -> Path:
    run = folder / "resnet18"
    run.mkdir()
    unpack_demo(run)
    return run


if __name__ == "__main__":
    sys.exit(main())
