from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tvm_adaptive._tvm import load_module
from tvm_adaptive.cli import main
from tvm_adaptive.database.location import user_store
from tvm_adaptive.errors import InvalidOptionError, WorkerError
from tvm_adaptive.tuning import doctor
from tvm_adaptive.tuning.doctor import CheckResult, is_fit, noise_result
from tvm_adaptive.tuning.tune import tune

REAL_WHICH = shutil.which


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that takes programs away."""

    def take(*names: str) -> None:
        monkeypatch.setattr(
            shutil, "which", lambda name, *a, **k: None if name in names else REAL_WHICH(name)
        )

    return take


def test_the_command_says_what_it_found_and_that_all_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--quick", "--work-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    names = [line.split()[1] for line in printed.splitlines() if not line.startswith(" ")]
    assert names[:5] == ["versions", "compiler", "processor", "cores", "memory"]
    assert "compiles, links and runs" in printed
    assert "PROBLEM" not in printed


def test_the_command_fails_where_something_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_time_in_worker", lambda *_: [1.0])
    (tmp_path / "file").touch()
    assert main(["doctor", "--quick", "--work-dir", str(tmp_path / "file" / "runs")]) == 1
    printed = capsys.readouterr().out
    assert "PROBLEM  work directory" in printed
    assert "--work-dir" in printed


def test_without_a_compiler_nothing_can_be_tuned(
    without: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As TVM looks for it.
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler, which CXX" in doctor.check_compiler().text
    with pytest.raises(InvalidOptionError, match="no-such-compiler, which CXX"):
        tune("te:GMM", work_dir=tmp_path / "run", trials=1)
    assert not (tmp_path / "run").exists()
    monkeypatch.delenv("CXX")
    monkeypatch.delenv("CC", raising=False)
    with monkeypatch.context() as changed:
        changed.setenv("PATH", str(tmp_path))
        found = doctor.check_compiler()
        assert found.verdict == "problem"
        assert "gcc" in found.fix
        with pytest.raises(InvalidOptionError, match="no C compiler"):
            tune("te:GMM", work_dir=tmp_path / "run", trials=1)
        assert not (tmp_path / "run").exists()
    without("ld")
    assert doctor.check_compiler().verdict == "warning"
    without()
    assert doctor.check_compiler().verdict == "ok"


@pytest.mark.parametrize(("name", "verdict"), [("generic", "warning"), ("znver4", "ok")])
def test_a_processor_without_a_name_is_reported(
    monkeypatch: pytest.MonkeyPatch, name: str, verdict: str
) -> None:
    class Fake:
        attrs = {"mcpu": name}  # noqa: RUF012 - a stand-in of TVM's

    monkeypatch.setattr(doctor, "resolve_target", lambda spec: Fake())
    assert doctor.check_processor().verdict == verdict


def test_another_number_of_threads_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    monkeypatch.setattr(doctor, "cpu_limit", lambda *_: None)
    assert doctor.check_cores().verdict == "ok"
    monkeypatch.setenv("TVM_NUM_THREADS", "77")
    found = doctor.check_cores()
    assert found.verdict == "warning"
    assert "TVM_NUM_THREADS is 77" in found.text


@pytest.mark.parametrize(("free_gb", "verdict"), [(64.0, "ok"), (0.5, "warning"), (None, "ok")])
def test_little_memory_is_reported(
    monkeypatch: pytest.MonkeyPatch, free_gb: float | None, verdict: str
) -> None:
    free = None if free_gb is None else int(free_gb * 2**30)
    monkeypatch.setattr(doctor, "available_memory", lambda: free)
    assert doctor.check_memory().verdict == verdict


def test_a_gpu_is_tried_with_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise WorkerError("Traceback (most recent call last):\n  ...\nRuntimeError: no nvrtc\n")

    monkeypatch.setattr(doctor, "_output_of", lambda command: "")
    assert doctor.check_gpu().verdict == "ok"
    monkeypatch.setattr(doctor, "_output_of", lambda command: "GPU 0: H100 (UUID: x)\n")
    monkeypatch.setattr(doctor, "resolve_target", lambda spec: None)
    monkeypatch.setattr(doctor, "_in_worker", fail)
    found = doctor.check_gpu()
    # Who tunes for the CPU needs none.
    assert found.verdict == "warning"
    assert "RuntimeError: no nvrtc" in found.text
    assert "tvm-adaptive[cuda]" in found.fix
    monkeypatch.setattr(doctor, "_in_worker", lambda *_: None)
    assert doctor.check_gpu() == CheckResult("GPU", "ok", "GPU 0: H100; a kernel compiles and runs")


def test_a_gpu_that_is_hidden_does_not_keep_from_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise InvalidOptionError("TVM found none")

    monkeypatch.setattr(doctor, "_output_of", lambda command: "GPU 0: H100 (UUID: x)\n")
    monkeypatch.setattr(doctor, "resolve_target", refuse)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = doctor.check_gpu()
    assert is_fit([found])
    assert "CUDA_VISIBLE_DEVICES is ''" in found.text


def test_the_kernel_is_loaded_where_runs_load_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Path] = []

    def load(path: str) -> Any:
        loaded.append(Path(path))
        return load_module(path)

    monkeypatch.setattr(doctor, "load_module", load)
    monkeypatch.setattr(doctor, "give_threads_cores", lambda: None)  # here, it is for good
    monkeypatch.setattr(doctor, "_in_worker", lambda function, args, _: function(*args))
    results = doctor.examine(tmp_path / "runs" / "net", with_noise=False)
    assert is_fit(results)
    assert [tmp_path in path.parents for path in loaded] == [True]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert doctor.check_work_dir(tmp_path / "runs").verdict == "problem"


def test_a_full_disk_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert doctor.check_work_dir(tmp_path / "runs").verdict == "problem"
    # Nothing was made.
    assert not (tmp_path / "runs").exists()


def test_a_store_that_does_not_open_is_a_warning() -> None:
    assert doctor.check_store().verdict == "ok"
    user_store().write_bytes(b"something else" * 1000)
    assert doctor.check_store().verdict == "warning"


def test_noise_has_a_verdict() -> None:
    quiet = [1.0 + 0.001 * i for i in range(50)]
    loud = [1.0, 1.3] * 25
    assert noise_result(quiet).verdict == "ok"
    found = noise_result(loud)
    assert found.verdict == "warning"
    assert "30.0%" in found.text


def test_a_check_that_fails_itself_is_a_problem() -> None:
    def fails() -> CheckResult:
        raise RuntimeError("first line\nthe reason")

    found = doctor._run("kernel", fails)
    assert (found.verdict, found.text) == ("problem", "the reason")
    assert not is_fit([found])
    assert is_fit([CheckResult("a", "warning", "x")])
