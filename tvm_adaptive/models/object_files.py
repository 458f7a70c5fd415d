"""Compile the functions of a network to object files, in several processes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tvm_adaptive._tvm import IRModule, Part, save_json, write_object
from tvm_adaptive.workers.forks import MAX_JOBS, run_in_forks

# With fewer shares one long one may be the last; with more, each costs its own set-up.
_SHARES_PER_PROCESS = 8
# Of tuned functions, of others, and of others that are compiled quickly; those of a share for the
# same target are one job.
_MOST_TARGETS = 3
# In the text of a function that calls another one.
_CALL = '"ir.GlobalVar"'


def write_objects(
    parts: Sequence[Part], folder: str, n_processes: int
) -> tuple[list[str], list[Part]]:
    """Compile functions of a network to object files in a folder, within the target.

    Returns the paths of the files, and the functions in none of them: one, because TVM exports no
    network without a library, or all where they cannot be divided.
    """
    if n_processes == 1 or any(target.kind.name != "llvm" for _, target in parts):
        return [], list(parts)
    alone = [(IRModule({v: f}), target) for mod, target in parts for v, f in mod.functions.items()]
    texts = [save_json(f) for mod, _ in parts for f in mod.functions.values()]
    # A function that calls another one is compiled together with it.
    if not alone or any(_CALL in text for text in texts):
        return [], list(parts)
    *shared, least = sorted(range(len(alone)), key=lambda index: -len(texts[index]))
    jobs = [
        joined
        for share in divide([len(texts[index]) for index in shared], n_processes)
        for joined in _joined([alone[shared[index]] for index in share])
    ]
    paths = [os.path.join(folder, f"part{number}.o") for number in range(len(jobs))]
    run_in_forks(lambda number: write_object(jobs[number], paths[number]), len(jobs), n_processes)
    return paths, [alone[least]]


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


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Join the parts of each target, of which there are few."""
    joined: list[Part] = []
    for mod, target in parts:
        same = next((other for other, of_other in joined if of_other.same_as(target)), None)
        if same is None:
            joined.append((IRModule(dict(mod.functions.items())), target))
        else:
            same.update(mod)
    return joined
