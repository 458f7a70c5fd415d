"""Compile the functions of a network to object files, in several processes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tvm_adaptive._tvm import IRModule, Part, PrimFunc, Target, save_json, write_object
from tvm_adaptive.errors import machine_failure, summary_line
from tvm_adaptive.workers.forks import MAX_JOBS, run_in_forks

# With fewer shares one long one may be the last; with more, each costs its own set-up.
_SHARES_PER_PROCESS = 8
# Of tuned functions, of others, and of others that are compiled quickly; those of a share for the
# same target are one job.
_MOST_TARGETS = 3
# In the text of a function that calls another one.
_CALL = '"ir.GlobalVar"'
_OBJECT_SUFFIX = ".o"
# Lists the functions of the object file of that name. It is written when that file is complete.
_CONTENT_SUFFIX = ".functions"
# Says why the compiler refuses a function.
_REFUSAL_SUFFIX = ".refused"


class ObjectFiles(NamedTuple):
    """The functions of a network in object files, and the others."""

    paths: list[str]
    # One function, because TVM exports no network without a library, or all of them where they
    # cannot be divided.
    rest: list[Part]
    refused: dict[str, str]  # the functions that cannot be compiled, and why


@dataclasses.dataclass(frozen=True)
class _Function:
    """A function to compile."""

    variable: Any
    function: PrimFunc
    target: Target
    text: str
    key: str  # differs for other functions, and for other targets

    @property
    def name(self) -> str:
        return str(self.variable.name_hint)


def write_objects(parts: Sequence[Part], folder: str, n_processes: int) -> ObjectFiles:
    """Compile functions of a network to object files in a folder, within the target.

    Object files that an earlier call has left there are used again where they hold nothing else.
    """
    if any(target.kind.name != "llvm" for _, target in parts):
        return ObjectFiles([], list(parts), {})
    functions = {each.key: each for each in _functions_of(parts)}
    # A function that calls another one is compiled together with it.
    if not functions or any(_CALL in each.text for each in functions.values()):
        return ObjectFiles([], list(parts), {})
    place = Path(folder)
    kept = _kept_objects(place, {key: len(each.text) for key, each in functions.items()})
    is_kept = {key for keys in kept.values() for key in keys}
    *shared, least = sorted(
        (each for key, each in functions.items() if key not in is_kept),
        key=lambda each: -len(each.text),
    )
    jobs = [
        job
        for share in divide([len(each.text) for each in shared], n_processes)
        for job in _by_target([shared[index] for index in share])
    ]
    run_in_forks(lambda number: _write_object(jobs[number], place), len(jobs), n_processes)
    paths, refused = list(map(str, kept)), {}
    for job in jobs:
        for written in [job] if _is_complete(job, place) else [[each] for each in job]:
            if _is_complete(written, place):
                paths.append(str(_path_of(written, place)))
            else:
                refused[written[0].name] = _refusal_file(written[0], place).read_text()
    return ObjectFiles(paths, [_joined([least])], refused)


def divide(works: Sequence[float], n_processes: int) -> list[list[int]]:
    """Divide functions into shares, those with the most work first; return their indices.

    A text says little about the time that LLVM needs, so that no division is even: a process
    takes the next share when it is free, and the largest functions have shares of their own.
    """
    n_shares = min(_SHARES_PER_PROCESS * n_processes, MAX_JOBS // _MOST_TARGETS - 1)
    most = sum(works) / n_shares
    shares: list[list[int]] = []
    work_of_last = most
    for index in sorted(range(len(works)), key=lambda index: -works[index]):
        if work_of_last >= most:
            shares.append([])
            work_of_last = 0.0
        shares[-1].append(index)
        work_of_last += works[index]
    return shares


def _functions_of(parts: Sequence[Part]) -> Iterator[_Function]:
    for mod, target in parts:
        target_text = save_json(target)
        for variable, function in mod.functions.items():
            text = save_json(function)
            name = str(variable.name_hint)
            digest = hashlib.sha256(f"{target_text}\n{name}\n{text}".encode())
            yield _Function(variable, function, target, text, digest.hexdigest())


def _kept_objects(place: Path, works: Mapping[str, int]) -> dict[Path, list[str]]:
    """Return object files that hold some of these functions and nothing else, not all of them."""
    complete: dict[Path, list[str]] = {}
    for file in sorted(place.glob(f"*{_CONTENT_SUFFIX}")):
        with contextlib.suppress(ValueError):  # its writer was killed
            keys = json.loads(file.read_text())
            if works.keys() >= set(keys):
                complete[file.with_suffix(_OBJECT_SUFFIX)] = keys
    found: dict[Path, list[str]] = {}
    left = set(works)
    for path in sorted(complete, key=lambda each: -sum(works[key] for key in complete[each])):
        if left > set(complete[path]):  # no function is in two, and one is in none
            found[path] = complete[path]
            left.difference_update(complete[path])
    return found


def _by_target(functions: Sequence[_Function]) -> list[list[_Function]]:
    """Divide functions by their targets, of which there are few."""
    found: list[list[_Function]] = []
    for each in functions:
        same = next((those for those in found if those[0].target.same_as(each.target)), None)
        if same is None:
            found.append([each])
        else:
            same.append(each)
    return found


def _joined(functions: Sequence[_Function]) -> Part:
    return IRModule({each.variable: each.function for each in functions}), functions[0].target


def _write_object(functions: Sequence[_Function], place: Path) -> None:
    """Compile functions to one object file; if one is refused, each to a file of its own."""
    path = _path_of(functions, place)
    try:
        write_object(_joined(functions), str(path))
    except Exception as error:
        if machine_failure(error):
            raise
        for each in functions if len(functions) > 1 else []:
            _write_object([each], place)
        if len(functions) == 1:
            _refusal_file(functions[0], place).write_text(summary_line(error))
        return
    path.with_suffix(_CONTENT_SUFFIX).write_text(json.dumps([each.key for each in functions]))


def _path_of(functions: Sequence[_Function], place: Path) -> Path:
    """Return the object file of functions, whose name only the same ones have."""
    digest = hashlib.sha256("".join(sorted(each.key for each in functions)).encode())
    return place / f"{digest.hexdigest()}{_OBJECT_SUFFIX}"


def _is_complete(functions: Sequence[_Function], place: Path) -> bool:
    return _path_of(functions, place).with_suffix(_CONTENT_SUFFIX).is_file()


def _refusal_file(function: _Function, place: Path) -> Path:
    return place / f"{function.key}{_REFUSAL_SUFFIX}"
