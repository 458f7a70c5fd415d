from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm.script import ir as I
from tvm.script import tirx as T

from tvm_adaptive._tvm import IRModule, Part, Target, te_workload
from tvm_adaptive.models import object_files
from tvm_adaptive.models.object_files import divide, write_objects
from tvm_adaptive.tuning.target import resolve_target


@given(st.lists(st.floats(1.0, 1e6), max_size=60), st.integers(1, 16))
def test_a_division_has_each_function_once_and_long_ones_first(
    works: list[float], n_processes: int
) -> None:
    shares = divide(works, n_processes)
    order = [index for share in shares for index in share]
    assert sorted(order) == list(range(len(works)))
    assert [works[index] for index in order] == sorted(works, reverse=True)
    # No share is longer than one function beyond an even share.
    even = sum(works) / (8 * n_processes)
    assert all(sum(works[index] for index in share[:-1]) < even for share in shares)
    assert len(shares) <= 8 * n_processes + 1


def test_a_division_by_hand() -> None:
    assert divide([1.0, 20.0, 2.0, 10.0, 3.0, 4.0], 1) == [[1], [3], [5, 4], [2, 0]]
    assert divide([], 4) == []


def test_a_division_for_many_processes_has_few_enough_shares() -> None:
    assert 2 * len(divide([1.0] * 5000, 4096)) <= object_files.MAX_JOBS


def networks_functions(n: int) -> IRModule:
    function = te_workload("GMM")["main"]
    return IRModule({f"f{i}": function.with_attr("global_symbol", f"f{i}") for i in range(n)})


@pytest.mark.parametrize(
    ("target", "n_processes"), [(resolve_target("cpu"), 1), (Target({"kind": "c"}), 2)]
)
def test_one_process_and_other_compilers_divide_nothing(
    tmp_path: Path, target: Target, n_processes: int
) -> None:
    whole = (networks_functions(3), target)
    assert write_objects([whole], str(tmp_path), n_processes) == ([], [whole])


@I.ir_module
class Calling:
    @T.prim_func(private=True, s_tir=True)
    def successor(a: T.int32) -> T.int32:
        return a + 1

    @T.prim_func(s_tir=True)
    def f(a: T.Buffer((4,), "int32")) -> None:
        for i in range(4):
            a[i] = Calling.successor(a[i])


def test_functions_that_call_others_stay_with_them(tmp_path: Path) -> None:
    target = resolve_target("cpu")
    functions = networks_functions(2).functions.items()
    whole = (IRModule({**dict(functions), **dict(Calling.functions.items())}), target)
    assert write_objects([whole], str(tmp_path), 2) == ([], [whole])
    assert not list(tmp_path.iterdir())


def test_functions_of_two_targets_are_compiled_each_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = resolve_target("cpu")
    untuned = Target({**target.export(), "opt-level": 2})
    compiled: list[tuple[list[str], Target]] = []

    def take(part: Part, path: str) -> None:
        compiled.append((sorted(v.name_hint for v in part[0].functions), part[1]))
        Path(path).touch()

    monkeypatch.setattr(object_files, "write_object", take)
    # Jobs run in this process only.
    monkeypatch.setattr(
        object_files, "run_in_forks", lambda job, n_jobs, _: [*map(job, range(n_jobs))]
    )
    whole = [(networks_functions(20), target), (networks_functions(40), untuned)]
    paths, rest = write_objects(whole, str(tmp_path), 2)
    assert sorted(map(str, tmp_path.iterdir())) == sorted(paths)
    assert len(paths) == len(compiled)
    ((left, of_left),) = rest
    compiled.append(([v.name_hint for v in left.functions], of_left))
    for mod, each in whole:
        names = [name for part, of in compiled if of.same_as(each) for name in part]
        assert sorted(names) == sorted(v.name_hint for v in mod.functions)
