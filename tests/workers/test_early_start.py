"""What a command starts before it imports TVM, and which program is a command."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tvm_adaptive.workers.early_start import RUN_MODULES, command_of, early_server, early_start
from tvm_adaptive.workers.main import hidden


@pytest.mark.parametrize(
    ("arguments", "original", "command"),
    [
        (["-m", "tune", "net.onnx"], ["python", "-m", "tvm_adaptive", "tune", "net.onnx"], "tune"),
        (["/usr/bin/tvm-adaptive", "apply"], ["python", "/usr/bin/tvm-adaptive", "apply"], "apply"),
        (["/usr/bin/tvm-adaptive"], ["python", "/usr/bin/tvm-adaptive"], ""),
        (["-m", "tune"], ["python", "-m", "pytest", "tune"], ""),
        (["-m", "tune"], ["python", "-m", "tvm_adaptive.other", "tune"], ""),
        (["/home/me/tune.py", "tune"], ["python", "/home/me/tune.py", "tune"], ""),
        (["-c", "tune"], ["python", "-c", "import tvm_adaptive", "tune"], ""),
        ([], [], ""),
    ],
)
def test_only_a_command_of_ours_starts_early(
    arguments: list[str], original: list[str], command: str
) -> None:
    assert command_of(arguments, original) == command


def test_another_program_has_no_early_server() -> None:
    assert early_server() is None


def test_an_interrupt_while_a_command_starts_has_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early_server()  # remembered: this program has none
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tvm-adaptive", "tune", "te:GMM"])
    with pytest.raises(SystemExit) as caught, early_start():
        raise KeyboardInterrupt
    assert caught.value.code == 130
    monkeypatch.setattr(sys, "argv", ["/home/me/program.py", "tune"])
    with pytest.raises(KeyboardInterrupt), early_start():
        raise KeyboardInterrupt


def test_the_modules_of_workers_exist() -> None:
    for name in RUN_MODULES:
        assert importlib.util.find_spec(name) is not None


def test_a_hidden_package_can_be_imported_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shy_package.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with hidden("shy_package"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("shy_package")
        assert "shy_package" not in sys.modules
    assert importlib.import_module("shy_package").__name__ == "shy_package"
    with hidden("shy_package"):  # it is imported already
        assert importlib.import_module("shy_package").__name__ == "shy_package"
    del sys.modules["shy_package"]


def test_a_command_does_not_import_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("print('torch is imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    command = [sys.executable, "-m", "tvm_adaptive", "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "torch" not in done.stdout
