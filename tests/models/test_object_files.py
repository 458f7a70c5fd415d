from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
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


def test_other_compilers_divide_nothing(tmp_path: Path) -> None:
    whole = (networks_functions(3), Target({"kind": "c"}))
    assert write_objects([whole], str(tmp_path), 2) == ([], [whole], {})


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
    assert write_objects([whole], str(tmp_path), 2) == ([], [whole], {})
    assert not list(tmp_path.iterdir())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[set[str], Target]]:
    """Return what is compiled to object files, each in this process and without a compiler."""
    found: list[tuple[set[str], Target]] = []

    def take(part: Part, path: str) -> None:
        Path(path).write_text("cut off")
        names = {str(variable.name_hint) for variable in part[0].functions}
        found.append((names, part[1]))
        if "refused" in " ".join(names):
            raise ValueError("unknown intrinsic")
        if "no-space" in " ".join(names):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(object_files, "write_object", take)
    monkeypatch.setattr(
        object_files, "run_in_forks", lambda job, n_jobs, _: [*map(job, range(n_jobs))]
    )
    return found


def names_in(parts: Sequence[Part]) -> list[str]:
    return [str(variable.name_hint) for mod, _ in parts for variable in mod.functions]


def test_functions_of_two_targets_are_compiled_each_for_its_own(
    tmp_path: Path, compiled: list[tuple[set[str], Target]]
) -> None:
    target = resolve_target("cpu")
    untuned = Target({**target.export(), "opt-level": 2})
    whole = [(networks_functions(20), target), (renamed(networks_functions(40), "g"), untuned)]
    paths, rest, refused = write_objects(whole, str(tmp_path), 2)
    assert sorted(map(str, tmp_path.glob("*.o"))) == sorted(paths)
    assert len(paths) == len(compiled) > 2
    assert refused == {}
    ((_, of_left),) = rest
    compiled.append((set(names_in(rest)), of_left))
    for mod, each in whole:
        names = [name for part, of in compiled if of.same_as(each) for name in part]
        assert sorted(names) == sorted(v.name_hint for v in mod.functions)


def renamed(mod: IRModule, prefix: str, which: slice = slice(None)) -> IRModule:
    """Change the names of some functions."""
    functions = {str(v.name_hint): f for v, f in mod.functions.items()}
    for name in sorted(functions)[which]:
        function = functions.pop(name)
        functions[f"{prefix}{name}"] = function.with_attr("global_symbol", f"{prefix}{name}")
    return IRModule(functions)


def test_what_has_not_changed_is_not_compiled_again(
    tmp_path: Path, compiled: list[tuple[set[str], Target]]
) -> None:
    target, folder = resolve_target("cpu"), str(tmp_path)
    whole = networks_functions(30)
    first = write_objects([(whole, target)], folder, 2)
    shares = [names for names, _ in compiled]
    assert max(map(len, shares)) > 1
    compiled.clear()
    # Read again, functions are other objects.
    same = networks_functions(30)
    assert set(write_objects([(same, target)], folder, 2).paths) == set(first.paths)
    assert compiled == []
    changed = renamed(whole, "new-", slice(1))
    second = write_objects([(changed, target)], folder, 2)
    (lost,) = [share for share in shares if "f0" in share]
    again = set().union(*(names for names, _ in compiled), names_in(second.rest))
    assert again == {*(lost - {"f0"}), "new-f0", *names_in(first.rest)}
    assert len(set(first.paths) & set(second.paths)) == len(shares) - 1
    # For another target everything is.
    compiled.clear()
    other = Target({**target.export(), "opt-level": 2})
    third = write_objects([(changed, other)], folder, 2)
    assert not set(second.paths) & set(third.paths)
    assert sum(len(names) for names, _ in compiled) == 29


def test_functions_in_two_object_files_are_taken_from_one(
    tmp_path: Path, compiled: list[tuple[set[str], Target]]
) -> None:
    target, folder = resolve_target("cpu"), str(tmp_path)
    whole = networks_functions(40)
    held: list[set[str]] = []
    for which in (slice(0), slice(0, 12), slice(6, 30), slice(0)):
        functions = renamed(whole, "new-", which)
        compiled.clear()
        found = write_objects([(functions, target)], folder, 2)
        names = [name for path in found.paths for name in names_of(path, functions, target)]
        assert sorted([*names, *names_in(found.rest)]) == sorted(names_in([(functions, target)]))
        held.append(set(found.paths))
    assert held[3] & held[0]


def names_of(path: str, mod: IRModule, target: Target) -> list[str]:
    """Return the functions that an object file is said to hold."""
    names = {each.key: each.name for each in object_files._functions_of([(mod, target)])}
    return [names[key] for key in json.loads(Path(path).with_suffix(".functions").read_text())]


def test_what_a_killed_compiler_leaves_is_not_used(
    tmp_path: Path, compiled: list[tuple[set[str], Target]]
) -> None:
    target, folder = resolve_target("cpu"), str(tmp_path)
    whole = (networks_functions(20), target)
    first = write_objects([whole], folder, 2)
    unlisted, cut_off, *_ = (Path(path).with_suffix(".functions") for path in first.paths)
    unlisted.unlink()
    cut_off.write_text(cut_off.read_text()[:-9])
    n_jobs = len(compiled)
    compiled.clear()
    second = write_objects([whole], folder, 2)
    assert 0 < len(compiled) < n_jobs
    names = [name for path in second.paths for name in names_of(path, *whole)]
    assert sorted([*names, *names_in(second.rest)]) == sorted(names_in([whole]))


def test_one_function_that_is_refused_leaves_the_others(
    tmp_path: Path, compiled: list[tuple[set[str], Target]]
) -> None:
    target, folder = resolve_target("cpu"), str(tmp_path)
    sound = networks_functions(30)
    faulty = renamed(sound, "refused-", slice(3, 5))
    found = write_objects([(faulty, target)], folder, 2)
    refused = [name for name in names_in([(faulty, target)]) if "refused" in name]
    assert found.refused == dict.fromkeys(refused, "unknown intrinsic")
    compiled.clear()
    second = write_objects([(sound, target)], folder, 2)
    assert second.refused == {}
    again = set().union(*(names for names, _ in compiled), names_in(second.rest))
    assert again == {*(name.removeprefix("refused-") for name in refused), *names_in(found.rest)}


def test_a_full_disk_is_no_refusal(tmp_path: Path, compiled: list[tuple[set[str], Target]]) -> None:
    faulty = renamed(networks_functions(30), "no-space-", slice(3, 5))
    with pytest.raises(OSError, match="No space"):
        write_objects([(faulty, resolve_target("cpu"))], str(tmp_path), 2)
