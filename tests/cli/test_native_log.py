"""Native warnings go to a file of the run; Python's own messages stay on standard error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tvm_adaptive.cli.display import Display
from tvm_adaptive.cli.native_log import NATIVE_LOG, NativeLog

# Writes as C++ does, through the descriptor, at each step; {body} is what happens within.
PROGRAM = """
import faulthandler, logging, os, sys
from pathlib import Path
from tvm_adaptive.cli.native_log import NativeLog, StandardErrorHandler
logging.basicConfig(handlers=[StandardErrorHandler()])
log = NativeLog(Path(sys.argv[1]))
with log.opened():
    os.write(2, b"native before\\n")
    log.begin()
    os.write(2, b"native within\\n")
    print("python within", file=sys.stderr)
    logging.warning("logged within")
    {body}
os.write(2, b"native after\\n")
print("python after", file=sys.stderr)
"""


def run(path: Path, body: str = "pass", *options: str) -> tuple[str, str, int]:
    """Run the program; return its standard error, the log and its exit code."""
    command = [sys.executable, *options, "-c", PROGRAM.format(body=body), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return result.stderr, path.read_text() if path.exists() else "", result.returncode


def test_only_native_text_goes_to_the_log_and_only_within(tmp_path: Path) -> None:
    shown, log, code = run(tmp_path / "logs" / "native.log")
    assert shown.splitlines() == [
        "native before",
        "python within",
        "WARNING:root:logged within",
        "native after",
        "python after",
    ]
    assert log == "native within\n"
    assert code == 0


# A shell starts programs in the background with interrupts ignored.
INTERRUPT = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "signal.raise_signal(signal.SIGINT)"
)


@pytest.mark.parametrize(
    ("body", "text"),
    [("raise RuntimeError('boom')", "RuntimeError: boom"), (INTERRUPT, "KeyboardInterrupt")],
)
def test_tracebacks_stay_on_standard_error(tmp_path: Path, body: str, text: str) -> None:
    shown, log, code = run(tmp_path / "native.log", body)
    assert text in shown
    assert log == "native within\n"
    assert code != 0


def test_a_crash_still_dumps_its_stack_where_it_is_seen(tmp_path: Path) -> None:
    body = "os.kill(os.getpid(), 11)"
    shown, _, code = run(tmp_path / "native.log", body)
    assert "Segmentation fault" in shown
    assert code == -11


def test_nothing_is_left_where_nothing_was_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM.format(body="pass").replace("within", "")]
    command[-1] = command[-1].replace('os.write(2, b"native \\n")', "pass")
    subprocess.run([*command, str(tmp_path / "logs" / "native.log")], timeout=120, check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_costs_the_log_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown, _, code = run(tmp_path / "file" / "native.log")
    assert "native within" in shown
    assert code == 0


def test_the_standard_error_of_a_host_program_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.fstat(2)
    with NativeLog(tmp_path / "native.log").opened() as log:  # pytest's stderr is no descriptor
        log.begin()
        now = os.fstat(2)
        assert (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino)
        sys.stderr.write("hello\n")
    assert capsys.readouterr().err == "hello\n"
    assert not (tmp_path / "native.log").exists()


def test_without_a_standard_error_nothing_is_moved(tmp_path: Path) -> None:
    source = PROGRAM.format(body="pass").replace("os.write(2", "len(")
    script = tmp_path / "program.py"
    script.write_text(source.replace('len(, b"', 'len(b"'))
    command = f'exec "{sys.executable}" "{script}" "{tmp_path / "native.log"}" 2>&-'
    assert subprocess.run(["sh", "-c", command], timeout=120, check=False).returncode == 0
    assert not (tmp_path / "native.log").exists()


def test_the_log_begins_with_the_first_event_of_a_run(tmp_path: Path) -> None:
    class Log(NativeLog):
        n_begun = 0

        def begin(self) -> None:
            self.n_begun += 1

    from rich.console import Console

    log = Log(tmp_path / NATIVE_LOG)
    with Display(Console(), quiet=True, native_log=log) as display:
        display.stage("prepare")
        assert log.n_begun == 0  # the directory may be another run's
        display.event({"event": "journal"})
        assert log.n_begun == 1
