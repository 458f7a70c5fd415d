from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import tvm
from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir.meta_schedule.builder import BuilderInput
from tvm.target import Target
from tvm_ffi import structural_hash

from tvm_adaptive.builder import persistent
from tvm_adaptive.builder.compile import build_candidate
from tvm_adaptive.builder.persistent import PersistentBuilder
from tvm_adaptive.errors import InvalidOptionError, is_machine_failure, is_out_of_time
from tvm_adaptive.measure_callback.journal import Journal, read_journal
from tvm_adaptive.values.trial_log import TrialLog

# Workers cannot import this file; its functions travel whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LLVM = Target({"kind": "llvm", "num-cores": 1})
AVX512 = Target({"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 1})


def matmul(n: int, a_type: str = "float32", out_type: str = "float32") -> tvm.IRModule:
    a = te.placeholder((n, n), a_type, name="A")
    b = te.placeholder((n, n), "int8" if a_type == "uint8" else a_type, name="W")
    k = te.reduce_axis((0, n), name="k")
    c = te.compute(
        (n, n),
        lambda i, j: te.sum(a[i, k].astype(out_type) * b[j, k].astype(out_type), axis=k),
        name="compute",
    )
    return tvm.IRModule({"main": te.create_prim_func([a, b, c])})


def tiled(n: int, factor: int) -> tvm.IRModule:
    schedule = Schedule(matmul(n))
    i, _, _ = schedule.get_loops(schedule.get_sblock("compute"))
    outer, _ = schedule.split(i, factors=[None, factor])
    schedule.parallel(outer)
    return schedule.mod


def tensorized() -> tvm.IRModule:
    from tvm.s_tir.tensor_intrin.x86 import AVX512_DOT_16x4_INTRIN

    schedule = Schedule(matmul(64, "uint8", "int32"))
    block = schedule.get_sblock("compute")
    schedule.transform_layout(block, "W", lambda i, j: [i // 16, j // 4, i % 16, j % 4])
    _, j, k = schedule.get_loops(block)
    _, inner = schedule.split(j, factors=[None, 16])
    outer, within = schedule.split(k, factors=[None, 4])
    schedule.reorder(outer, inner, within)
    schedule.decompose_reduction(block, outer)
    schedule.tensorize(inner, AVX512_DOT_16x4_INTRIN)
    return schedule.mod


def misbehave(how: str, bad_size: int, mod: Any, target: Any, params: Any) -> Any:
    size = int(mod["main"].params[0].shape[0])
    if size == bad_size:
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "hang":
            time.sleep(1000)
        if how == "raise":
            raise RuntimeError("register allocation went wrong")
    return build_candidate(mod, target, params)


def test_builds_what_loads_and_computes(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    builder = PersistentBuilder(max_workers=2, journal=journal)
    try:
        results = builder.build([BuilderInput(tiled(16, f), LLVM) for f in (2, 4, 8)])
        assert [result.error_msg for result in results] == [None] * 3
        folders = {os.path.dirname(result.artifact_path) for result in results}
        assert len(folders) == 3
        a, b = np.random.default_rng(0).random((2, 16, 16)).astype("float32")
        for result in results:
            out = tvm.runtime.tensor(np.full((16, 16), np.nan, "float32"))
            loaded = tvm.runtime.load_module(result.artifact_path)
            loaded["main"](tvm.runtime.tensor(a), tvm.runtime.tensor(b), out)
            np.testing.assert_allclose(out.numpy(), a @ b.T, rtol=1e-5)
    finally:
        builder.close()
    event = read_journal(tmp_path / "journal.jsonl")[-1]
    assert (event["event"], event["n"], event["n_errors"]) == ("build", 3, 0)
    assert event["seconds"] > 0
    assert not any(os.path.exists(folder) for folder in folders)


def test_a_call_through_tvm_keeps_the_workers_and_stock_cleans_up() -> None:
    builder = PersistentBuilder(max_workers=1, build_function=_with_pid)
    try:
        pids = set()
        remove = tvm.get_global_func("s_tir.meta_schedule.remove_build_dir")
        for _ in range(2):
            # The base class's method goes through C++, as the task scheduler does.
            (result,) = tvm.s_tir.meta_schedule.Builder.build(
                builder, [BuilderInput(tiled(8, 2), LLVM)]
            )
            folder = Path(result.artifact_path).parent
            pids.add((folder.parent / "pid").read_text())
            remove(result.artifact_path)
            assert not folder.exists()
        assert len(pids) == 1
        assert folder.parent.exists()
    finally:
        builder.close()


def _with_pid(mod: Any, target: Any, params: Any) -> Any:
    Path(os.environ["TMPDIR"]).joinpath("pid").write_text(str(os.getpid()))
    return build_candidate(mod, target, params)


@pytest.mark.slow
def test_a_tensorized_schedule_builds_without_importing_the_intrinsics() -> None:
    builder = PersistentBuilder(max_workers=1, timeout_sec=60, build_function=_no_intrinsics)
    try:
        (result,) = builder.build([BuilderInput(tensorized(), AVX512)])
    finally:
        builder.close()
    assert result.error_msg is None


def _no_intrinsics(mod: Any, target: Any, params: Any) -> Any:
    built = build_candidate(mod, target, params)
    assert "tvm.s_tir.tensor_intrin" not in sys.modules
    assert "vpmaddubsw" in built.inspect_source("asm")
    return built


@pytest.mark.slow
def test_a_build_that_needs_an_intrinsic_gets_it() -> None:
    builder = PersistentBuilder(max_workers=1, timeout_sec=120, build_function=_needs_intrinsic)
    try:
        (result,) = builder.build([BuilderInput(tiled(8, 2), LLVM)])
    finally:
        builder.close()
    assert result.error_msg is None


def _needs_intrinsic(mod: Any, target: Any, params: Any) -> Any:
    tvm.s_tir.TensorIntrin.get("dot_16x4_vnni")
    return build_candidate(mod, target, params)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("crash", "Error: the worker process ended: killed by SIGSEGV"),
        ("hang", "Timeout: timeout: killed after 3 s"),
        ("raise", "register allocation went wrong"),
    ],
)
def test_a_bad_compilation_costs_one_result(how: str, message: str, tmp_path: Path) -> None:
    builder = PersistentBuilder(
        max_workers=2,
        timeout_sec=3,
        artifact_dir=tmp_path,
        build_function=functools.partial(misbehave, how, 16),
    )
    try:
        inputs = [BuilderInput(tiled(size, 2), LLVM) for size in (8, 16, 32)]
        good, bad, other = builder.build(inputs)
        (later,) = builder.build([BuilderInput(tiled(64, 2), LLVM)])
    finally:
        builder.close()
    assert good.error_msg is None
    assert other.error_msg is None
    assert later.error_msg is None
    assert bad.artifact_path is None
    assert message in bad.error_msg
    # A folder for each artifact, none for the failure, nothing else is left.
    kept = {Path(result.artifact_path).parent.name for result in (good, other, later)}
    assert {path.name for path in tmp_path.iterdir()} == kept


def full(disk: Path) -> Path:
    """Fill a disk but for what folders and names take."""
    with contextlib.suppress(OSError), (disk / "somebody-elses").open("wb") as file:
        while True:
            file.write(bytes(1 << 12))
            file.flush()
    return disk / "somebody-elses"


@pytest.mark.parametrize("link", [True, False])
@pytest.mark.parametrize("makes_room", [True, False])
@pytest.mark.parametrize("is_warm", [True, False])
def test_a_full_disk_is_not_the_candidates_failure(
    make_disk: Any, monkeypatch: pytest.MonkeyPatch, link: bool, makes_room: bool, is_warm: bool
) -> None:
    disk = make_disk(2 << 20)
    builder = PersistentBuilder(max_workers=1, artifact_dir=disk / "artifacts", link=link)
    log = builder._trial_log = TrialLog()
    inputs = [BuilderInput(tiled(16, 2), LLVM)] * 2
    pauses = []
    try:
        if is_warm:
            assert builder.build([BuilderInput(tiled(8, 2), LLVM)])[0].error_msg is None
        filling = full(disk)

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if makes_room:
                filling.unlink()

        clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=pause)
        monkeypatch.setattr(persistent, "time", clock)
        results = builder.build(inputs)
    finally:
        monkeypatch.undo()
        builder.close()
    assert pauses == [2.0]
    for result in results:
        assert (result.error_msg is None) == makes_room
        assert is_machine_failure(result.error_msg) != makes_room
    assert (log.get(int(structural_hash(inputs[0].mod))).build_sec is not None) == makes_room


def test_what_cannot_be_started_fails_for_the_machine_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(persistent, "_RETRY_PAUSE_SEC", 0.01)
    builder = PersistentBuilder(max_workers=1)
    builder._pool._start_patience_sec = 0.0
    n_forks = []

    def refuse(*_: Any) -> Any:
        n_forks.append(1)
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    try:
        with monkeypatch.context() as patch:
            patch.setattr("tvm_adaptive.workers.process.ForkServer.fork", refuse)
            (refused,) = builder.build([BuilderInput(tiled(16, 2), LLVM)])
        (built,) = builder.build([BuilderInput(tiled(16, 2), LLVM)])
    finally:
        builder.close()
    assert str(refused.error_msg).startswith("machine: PersistentBuilder: Error: a worker process")
    assert len(n_forks) == 2  # and each is tried again by the pool
    assert built.error_msg is None


def test_builds_that_fail_at_once_cost_no_patience() -> None:
    how = functools.partial(misbehave, "raise", 16)
    builder = PersistentBuilder(max_workers=1, build_function=how)
    try:
        results = builder.build([BuilderInput(tiled(16, 2), LLVM)] * 4)
    finally:
        builder.close()
    assert all("register allocation" in str(each.error_msg) for each in results)
    assert builder._deadline_sec() == builder.timeout_sec


def test_params_reach_the_build_function() -> None:
    builder = PersistentBuilder(max_workers=1, build_function=_expects_params)
    try:
        params = {"w": tvm.runtime.tensor(np.arange(3, dtype="float32"))}
        (result,) = builder.build([BuilderInput(tiled(8, 2), LLVM, params)])
    finally:
        builder.close()
    assert result.error_msg is None


def _expects_params(mod: Any, target: Any, params: Any) -> Any:
    assert params["w"].numpy().tolist() == [0.0, 1.0, 2.0]
    return build_candidate(mod, target, params)


def test_a_closed_builder_answers_with_errors(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    builder = PersistentBuilder(max_workers=1, journal=journal)
    builder.close()
    builder.close()
    (result,) = builder.build([BuilderInput(tiled(8, 2), LLVM)])
    assert "could not be prepared" in result.error_msg
    assert read_journal(tmp_path / "journal.jsonl")[-1]["n_errors"] == 1
    assert builder.build([]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_workers": 0}, "max_workers must be at least 1 but got 0"),
        ({"max_uses": 0}, "max_uses must be at least 1 but got 0"),
        ({"timeout_sec": 0.0}, "timeout_sec must be above 0 but got 0.0"),
        ({"timeout_sec": float("nan")}, "timeout_sec must be above 0 but got nan"),
        ({"patience": 0.5}, "patience must be at least 1 but got 0.5"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        PersistentBuilder(**options)


def test_it_says_what_each_build_took() -> None:
    log = TrialLog()
    builder = PersistentBuilder(
        max_workers=2,
        trial_log=log,
        timeout_sec=3.0,
        build_function=functools.partial(misbehave, "hang", 8),
    )
    mods = [tiled(16, 2), tiled(8, 2)]
    try:
        good, hung = builder.build([BuilderInput(mod, LLVM) for mod in mods])
    finally:
        builder.close()
    assert good.error_msg is None
    assert hung.error_msg is not None
    first, second = (log.get(int(structural_hash(mod))).build_sec for mod in mods)
    assert first is not None
    # A failure costs its seconds like any other build; two workers share them.
    assert second >= 1.5
    assert 0 < first < second


@pytest.mark.parametrize(
    ("n_before", "given_up"), [pytest.param(3, False, marks=pytest.mark.slow), (4, True)]
)
def test_a_build_without_end_is_given_up_once_others_are_known(
    n_before: int, given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvm_adaptive.builder.persistent._LEAST_PATIENCE_SEC", 1.0)
    builder = PersistentBuilder(
        max_workers=1,
        timeout_sec=6.0,
        patience=2.0,
        build_function=functools.partial(misbehave, "hang", 8),
    )
    try:
        before = builder.build([BuilderInput(tiled(16, 2), LLVM)] * n_before)
        (hung,) = builder.build([BuilderInput(tiled(8, 2), LLVM)])
    finally:
        builder.close()
    assert all(result.error_msg is None for result in before)
    assert ("killed after 6 s" in hung.error_msg) is not given_up


def test_patience_follows_what_builds_take() -> None:
    builder = PersistentBuilder(timeout_sec=30.0, patience=10.0)
    builder._recent_sec.extend([0.1, 0.1, 0.1, 5.0])
    assert builder._deadline_sec() == 3.0  # the least
    builder._recent_sec.extend([0.7] * 5)
    assert builder._deadline_sec() == pytest.approx(7.0)
    builder._recent_sec.extend([20.0] * 20)
    assert builder._deadline_sec() == 30.0
    builder.close()


@pytest.mark.parametrize(("left_sec", "n_built"), [([60.0, 0.5, 0.0], 1), ([0.0, 0.0, 0.0], 0)])
def test_what_there_is_no_time_to_build_is_no_candidates_fault(
    tmp_path: Path, left_sec: list[float], n_built: int
) -> None:
    builder = PersistentBuilder(
        max_workers=1,
        timeout_sec=500.0,
        time_left=iter(left_sec).__next__,
        artifact_dir=tmp_path,
        build_function=functools.partial(misbehave, "hang", 16),
    )
    try:
        results = builder.build([BuilderInput(tiled(n, 2), LLVM) for n in (8, 16, 8)])
    finally:
        builder.close()
    messages = [result.error_msg for result in results]
    assert messages[:n_built] == [None] * n_built
    assert all(is_out_of_time(message) for message in messages[n_built:])
    assert len(list(tmp_path.glob("candidate-*"))) == n_built


def test_a_build_that_hangs_while_there_is_time_is_its_own_fault() -> None:
    build = functools.partial(misbehave, "hang", 16)
    builder = PersistentBuilder(
        max_workers=1, timeout_sec=1.0, time_left=lambda: 60.0, build_function=build
    )
    try:
        (result,) = builder.build([BuilderInput(tiled(16, 2), LLVM)])
    finally:
        builder.close()
    assert "Timeout" in result.error_msg
    assert not is_out_of_time(result.error_msg)
