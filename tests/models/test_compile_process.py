from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tvm_adaptive._tvm import (
    IRModule,
    Part,
    copy_record,
    estimate_tir_flops,
    ms,
    save_json,
    structural_hash,
    te,
    te_workload,
)
from tvm_adaptive.models import compile as compile_
from tvm_adaptive.models import (
    compile_network,
    extract,
    object_files,
    prepare,
    resnet18,
    run_exported,
    run_network,
)
from tvm_adaptive.models.compile import (
    export_function,
    export_module,
    schedule_network,
    schedule_tir,
)
from tvm_adaptive.models.run import try_function
from tvm_adaptive.models.weights import load_weighted_module, save_module
from tvm_adaptive.tuning.target import resolve_target


def test_a_network_compiled_elsewhere_is_the_same_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = resolve_target("cpu")
    network = resnet18(image_size=32, width=16, classes=10)
    prepared = prepare(network, target, prepack=None)
    mod, coverage = schedule_network(prepared, None, target)
    assert len(coverage.fallback) == len(extract(prepared, target))
    save_module(mod, tmp_path)
    # Its weights are in the other file, not in the text.
    assert (tmp_path / "weights.bin").stat().st_size > (tmp_path / "module.json").stat().st_size
    assert structural_hash(load_weighted_module(tmp_path)) == structural_hash(mod)
    library = tmp_path / "net.so"
    monkeypatch.setattr(compile_, "n_build_workers", lambda _: 1)
    export_module(str(tmp_path), save_json(target), str(library))
    inputs = network.random_inputs()
    (found,) = run_exported(library, inputs)
    (expected,) = run_network(compile_network(prepared, None, target), inputs)
    np.testing.assert_array_equal(found, expected)


def test_processes_that_share_a_network_compile_the_same(
    case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some functions have a schedule, others not: they are compiled for different targets.
    prepared, database = case.prepared["prepack"], ms.database.MemoryDatabase()
    for record in case.databases["prepack"].get_all_tuning_records()[::2]:
        copy_record(record, database)
    mod, coverage = schedule_network(prepared, database, case.target)
    assert coverage.tuned
    assert coverage.fallback
    (expected,) = run_network(compile_network(prepared, database, case.target), case.inputs)
    monkeypatch.setattr(compile_, "n_build_workers", lambda _: 3)
    for name in ("net.so", "net.tar"):
        folder = tmp_path / f"module of {name}"
        folder.mkdir()
        save_module(mod, folder)
        export_module(str(folder), save_json(case.target), str(tmp_path / name))
        assert len(list(folder.glob("*.functions"))) > 3
        (found,) = run_exported(tmp_path / name, case.inputs)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("most_flops", [0.0, 1e4, 1e12])
def test_what_is_only_compared_with_is_compiled_quickly_where_it_is_small(
    case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_flops: float
) -> None:
    monkeypatch.setattr(compile_, "_MOST_QUICK_FLOPS", most_flops)
    prepared, database = case.prepared["prepack"], ms.database.MemoryDatabase()
    for record in case.databases["prepack"].get_all_tuning_records()[::2]:
        copy_record(record, database)
    mod, coverage = schedule_network(prepared, database, case.target)
    targets = compile_._untuned_targets(mod, case.target, quick=True)
    assert not targets.keys() & coverage.tuned.keys()
    assert targets.keys() >= coverage.fallback.keys()
    flops = {name: estimate_tir_flops(IRModule({"main": mod[name]})) for name in targets}
    for name, target in targets.items():
        assert (target.attrs["opt-level"] == 0) == (flops[name] <= most_flops)
    assert all(
        target.attrs["opt-level"] > 0
        for target in compile_._untuned_targets(mod, case.target).values()
    )
    save_module(mod, tmp_path)
    library = tmp_path / "net.so"
    export_module(str(tmp_path), save_json(case.target), str(library), quick=True)
    (found,) = run_exported(library, case.inputs)
    (expected,) = run_network(compile_network(prepared, database, case.target), case.inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_functions_whose_operations_cannot_be_counted_are_not_compiled_quickly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n = te.var("n", "int64")
    x = te.placeholder((n,), name="x")
    doubled = te.compute((n,), lambda i: x[i] * 2.0, name="doubled")
    mod = IRModule({"doubled": te.create_prim_func([x, doubled])})

    def level() -> int:
        (found,) = compile_._untuned_targets(mod, resolve_target("cpu"), quick=True).values()
        return int(found.attrs["opt-level"])

    assert level() == 0  # TVM counts an unknown extent as 1

    def refuse(_mod: IRModule) -> float:
        raise ValueError("the extent of a loop is not constant")

    monkeypatch.setattr(compile_._tvm, "estimate_tir_flops", refuse)
    assert level() > 0


def test_functions_that_the_compiler_refuses_are_named(
    case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_part: Part, _path: str) -> None:
        raise ValueError("it cannot be compiled")

    save_module(schedule_network(case.prepared["NHWC"], None, case.target)[0], tmp_path)
    monkeypatch.setattr(compile_, "n_build_workers", lambda _: 2)
    monkeypatch.setattr(object_files, "write_object", refuse)
    library = tmp_path / "net.so"
    exported = export_module(str(tmp_path), save_json(case.target), str(library))
    assert set(exported.refused.values()) == {"it cannot be compiled"}
    assert len(exported.refused) > 3
    assert not library.exists()


def test_a_refused_function_has_the_name_that_it_had_before_its_weights_were_packed(
    case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mod, coverage = schedule_network(
        case.prepared["prepack"], case.databases["prepack"], case.target
    )
    packed: list[str] = []

    def refuse(part: Part, path: str) -> None:
        names = [str(variable.name_hint) for variable in part[0].functions]
        packed.extend(name for name in names if name.endswith("_prepacked") and len(names) == 1)
        if any(name.endswith("_prepacked") for name in names):
            raise ValueError("it cannot be compiled")
        Path(path).touch()

    save_module(mod, tmp_path)
    monkeypatch.setattr(compile_, "n_build_workers", lambda _: 1)
    monkeypatch.setattr(object_files, "write_object", refuse)
    folder = str(tmp_path)
    exported = export_module(folder, save_json(case.target), f"{folder}/net.so", folder)
    assert packed
    assert exported.refused.keys() == {name.removesuffix("_prepacked") for name in packed}
    assert exported.refused.keys() <= coverage.tuned.keys()


def test_the_only_function_of_a_network_can_be_refused(
    case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_code: object, parts: list[Part]) -> None:
        ((mod, _),) = parts
        assert len(mod.functions) == 1
        raise ValueError("it cannot be compiled")

    save_module(schedule_network(case.prepared["NHWC"], None, case.target)[0], tmp_path)
    monkeypatch.setattr(compile_, "n_build_workers", lambda _: 2)
    monkeypatch.setattr(compile_._tvm, "link_network", refuse)
    exported = export_module(str(tmp_path), save_json(case.target), str(tmp_path / "net.so"))
    assert list(exported.refused.values()) == ["it cannot be compiled"]


def test_a_library_of_functions_that_were_compiled_before_computes_the_same(
    case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_, "n_build_workers", lambda _: 2)
    objects = tmp_path / "objects"
    objects.mkdir()
    found, n_written = [], []
    for number, database in enumerate((case.databases["NHWC"], None, case.databases["NHWC"])):
        folder, library = tmp_path / str(number), tmp_path / f"{number}.so"
        folder.mkdir()
        save_module(schedule_network(case.prepared["NHWC"], database, case.target)[0], folder)
        exported = export_module(str(folder), save_json(case.target), str(library), str(objects))
        assert exported.refused == {}
        found.append(run_exported(library, case.inputs)[0])
        n_written.append(len(list(objects.glob("*.o"))))
    assert n_written[0] < n_written[1]
    assert n_written[2] - n_written[1] < n_written[0] / 2
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found[2], found[0])


def test_a_function_compiled_elsewhere_runs(tmp_path: Path) -> None:
    target = resolve_target("cpu")
    mod, _ = schedule_tir(te_workload("GMM"), target, None)
    path = str(tmp_path / "gmm.so")
    export_function(save_json(mod), save_json(target), path)
    shape = ((1, 128, 128), "float32")
    (a, b, c), latency_sec = try_function(path, [shape] * 3, "cpu", 0)
    np.testing.assert_allclose(c, a @ b, rtol=1e-4, atol=1e-4)
    assert latency_sec > 0
