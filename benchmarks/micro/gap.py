"""Tell where the time goes: our functions beside those of OpenVINO.

    python -m benchmarks.micro.gap runs/net --rounds 5 --top 20 --out gap.json

Give it work directories of finished runs of ``tvm-adaptive tune``. The deployed library and
OpenVINO are profiled function by function, in turns, each in a process of its own; the groups
of functions that are furthest behind come first. A whole inference is timed without profiling,
too, so that what passes outside of functions has a row of its own.

Times of our functions are medians, less what the instrument itself costs. OpenVINO counts
whole microseconds and gives means since the model was compiled; it is compiled anew in each
round, and the median of the rounds is shown. The roofline is the rate of a large product of
matrices, and the rate of copies between caches: a function whose data stay in a core's own
cache can exceed it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.machine import write_figure
from benchmarks.micro.gap_groups import (
    Block,
    Group,
    Node,
    Work,
    aligned,
    as_fields,
    match,
    openvino_work,
    table,
    work_of_blocks,
)
from tvm_adaptive._tvm import (
    IRModule,
    PrimFunc,
    Schedule,
    VirtualMachine,
    anchor_of,
    argument_bytes,
    buffer_of,
    estimate_tir_flops,
    has_blocks,
    tensor,
)
from tvm_adaptive.errors import AdaptiveError, InvalidOptionError
from tvm_adaptive.models import Network, prepare
from tvm_adaptive.models.forms import Alternatives
from tvm_adaptive.models.frontend import PEERS, READER_ENV, load, open_peer, time_peer
from tvm_adaptive.models.frontend.peers import compile_openvino
from tvm_adaptive.models.run import time_exported
from tvm_adaptive.tuning.resume import read_settings
from tvm_adaptive.tuning.target import n_threads_of, resolve_target
from tvm_adaptive.values.roofline import Roofline
from tvm_adaptive.workers import device_session
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.pool import WorkerPool
from tvm_adaptive.workers.roofline import measure_roofline
from tvm_adaptive.workers.scratch import ScratchFolder

Array = npt.NDArray[Any]

PEER = "openvino"
# Of one side in a round: a hundred inferences of a small network.
ROUND_SEC = 0.5
# Opening a large model and compiling it are part of a peer's round.
TIMEOUT_SEC = 300.0
# The first inferences allocate memory and start threads.
N_WARM_UP = 5
# A median of fewer inferences is moved by a single disturbance.
LEAST_RUNS = 5
# Threads of the one before spin for a while.
SETTLE_SEC = 0.1
# What the virtual machine does itself: it allocates, and makes views.
_BUILTIN = "vm.builtin."
# What TVM adds to the name of a function whose schedule packs a weight.
_PACKED = "_prepacked"


class CallTimer:
    """An instrument of a virtual machine: the seconds of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []
        self._start_sec = 0.0

    def __call__(self, _function: Any, name: str, is_before: bool, *_rest: Any) -> int:
        """Take the time before and after a call."""
        now_sec = time.perf_counter()
        if is_before:
            self._start_sec = time.perf_counter()
        else:
            self.calls.append((name, now_sec - self._start_sec))
        return 0


def profile_calls(
    path: str, inputs: Sequence[Array], seconds: float
) -> tuple[list[tuple[str, float]], float]:
    """Return the calls of functions of a library with their median milliseconds.

    Returns
    -------
    (calls, instrument_ms)
        The calls in their order, less what the instrument costs per call: the time of the
        cheapest built-in call, which does next to nothing.
    """
    where = device_session.device_of_kind("cpu")
    machine = VirtualMachine(device_session.load_once(path), where)
    tensors = [tensor(value, device=where) for value in inputs]
    for _ in range(N_WARM_UP):
        machine["main"](*tensors)
    timer = CallTimer()
    machine.set_instrument(timer)
    runs: list[list[tuple[str, float]]] = []
    for _ in repeated(seconds):
        timer.calls = []
        machine["main"](*tensors)
        runs.append(timer.calls)
    names = [name for name, _ in runs[0]]
    medians = [
        1e3 * statistics.median(run[place][1] for run in runs) for place in range(len(names))
    ]
    known = list(zip(names, medians, strict=True))
    instrument_ms = min((ms for name, ms in known if name.startswith(_BUILTIN)), default=0.0)
    calls = [
        (name.removesuffix(_PACKED), max(0.0, ms - instrument_ms))
        for name, ms in known
        if not name.startswith(_BUILTIN)
    ]
    return calls, instrument_ms


def repeated(seconds: float) -> Iterator[None]:
    """Yield until the time is over, at least ``LEAST_RUNS`` times."""
    end_sec, n_runs = time.perf_counter() + seconds, 0
    while n_runs < LEAST_RUNS or time.perf_counter() < end_sec:
        yield
        n_runs += 1


def profile_openvino(
    path: Path, inputs: Sequence[Array], n_threads: int, seconds: float
) -> list[Node]:
    """Compile a model in OpenVINO and return its nodes, with mean milliseconds."""
    import openvino

    compiled = compile_openvino(path, inputs, n_threads, PERF_COUNT="YES")
    request = compiled.create_infer_request()
    for place, value in enumerate(inputs):
        request.set_input_tensor(place, openvino.Tensor(np.ascontiguousarray(value)))
    for _ in range(N_WARM_UP):
        request.infer(share_outputs=True)
    before = {each.node_name: each for each in request.profiling_info}
    n_runs = N_WARM_UP
    for _ in repeated(seconds):
        request.infer(share_outputs=True)
        n_runs += 1
    described = {each.get_friendly_name(): each for each in compiled.get_runtime_model().get_ops()}
    nodes = []
    for each in request.profiling_info:
        if each.status != each.Status.EXECUTED or each.node_name not in described:
            continue
        about = described[each.node_name]
        facts = about.get_rt_info()
        micros = [
            n * (1e6 * info.real_time.total_seconds() + 0.5)
            for n, info in ((N_WARM_UP, before[each.node_name]), (n_runs, each))
        ]
        nodes.append(
            Node(
                each.node_name,
                _text(facts, "layerType"),
                tuple(tuple(map(int, port.get_shape())) for port in about.inputs()),
                tuple(map(int, about.output(0).get_shape())) if about.get_output_size() else (),
                # A mean of whole microseconds, rounded down, without the first inferences.
                max(0.0, micros[1] - micros[0]) / (n_runs - N_WARM_UP) / 1e3,
                _text(facts, "originalLayersNames"),
            )
        )
    return nodes


def _text(facts: Any, name: str) -> str:
    value = facts[name] if name in facts else ""  # noqa: SIM401 - no dict
    return str(value.astype(str)) if hasattr(value, "astype") else str(value)


def blocks_of(function: PrimFunc) -> list[Block]:
    """Return the blocks of a tensor function without a schedule; none if it has none."""
    if not has_blocks(function):
        return []
    schedule = Schedule(IRModule({"main": function}))
    found = []
    for each in schedule.get_child_blocks(schedule.get_sblock("root")):
        block = schedule.get(each)
        found.append(
            Block(
                str(block.name_hint),
                _extents(buffer_of(block.writes[0])),
                tuple(
                    int(variable.dom.extent)
                    for variable in block.iter_vars
                    if variable.iter_type == variable.CommReduce
                ),
                tuple(_extents(buffer_of(region)) for region in block.reads),
            )
        )
    return found


def _extents(buffer: Any) -> tuple[int, ...]:
    return tuple(map(int, buffer.shape))


def own_works(mod: IRModule, layout: str) -> dict[str, tuple[Work, float]]:
    """Return the work of each tensor function of a prepared network, and the bytes of a call."""
    found = {}
    for variable, function in mod.functions.items():
        if not isinstance(function, PrimFunc):
            continue
        alone, blocks, name = IRModule({"main": function}), blocks_of(function), variable.name_hint
        work = work_of_blocks(
            str(name),
            blocks,
            anchor_of(alone) if blocks else "",
            channels_last=layout == "NHWC",
            flop=float(estimate_tir_flops(alone)) if blocks else 0.0,
        )
        found[str(name)] = (work, float(argument_bytes(alone)))
    return found


def works_of_forms(
    forms: Alternatives, works: Mapping[str, tuple[Work, float]]
) -> dict[str, tuple[Work, float]]:
    """Return the work of the functions of forms: theirs is that of what they replace."""
    own = own_works(IRModule(dict(forms.functions)), "NHWC")
    found = {}
    for name, direct in forms.replaced.items():
        (work, n_bytes), (replaced, _) = own[name], works[direct]
        found[name] = (dataclasses.replace(replaced, name=name, flop=work.flop), n_bytes)
    return found


@dataclasses.dataclass
class Profile:
    """A network on both sides."""

    model: str
    framework: str
    n_threads: int
    roofline: Roofline
    whole_ms: tuple[float, float]  # ours, the peer's
    instrument_ms: float
    groups: list[Group]

    @property
    def title(self) -> str:
        """What was compared, and the machine's limits."""
        return (
            f"{self.model} beside {self.framework}, {self.n_threads} threads; roofline "
            f"{self.roofline.flop_per_sec / 1e9:.0f} GFLOP/s, "
            f"{self.roofline.bytes_per_sec / 1e9:.0f} GB/s"
        )

    def as_fields(self) -> dict[str, Any]:
        """Return what is written as JSON."""
        return {
            "model": self.model,
            "framework": self.framework,
            "n_threads": self.n_threads,
            "gflops_limit": self.roofline.flop_per_sec / 1e9,
            "gb_per_sec_limit": self.roofline.bytes_per_sec / 1e9,
            "ours_ms": self.whole_ms[0],
            "peer_ms": self.whole_ms[1],
            "instrument_ms": self.instrument_ms,
            "groups": [as_fields(group) for group in self.groups],
        }


def profile_run(run: Path, rounds: int) -> Profile:
    """Profile a finished run's library and OpenVINO, in turns."""
    options, _ = read_settings(run)
    target = resolve_target(options.target)
    network = load(options.what, options.input_shapes, inputs=options.inputs)
    if (
        not isinstance(network, Network)
        or network.original is None
        or network.original.file is None
    ):
        raise InvalidOptionError(f"{run}: only networks from a file can run in OpenVINO.")
    with contextlib.closing(network.original), contextlib.ExitStack() as stack:
        library = run / f"{network.name}.so"
        if not library.is_file():
            raise InvalidOptionError(f"{run} has no {library.name}; let the run come to its end.")
        inputs = network.inputs(options.seed or 0)
        prepared = prepare(network, target, **options.config.preparation)
        works = own_works(prepared.mod, prepared.layout)
        if prepared.alternatives is not None:
            works |= works_of_forms(prepared.alternatives, works)
        path = network.original.file(stack.enter_context(ScratchFolder("gap")))
        n_threads = n_threads_of(target)
        ours, theirs, theirs_whole, roof = (
            _pool(stack, env)
            for env in (
                thread_env(n_threads),
                READER_ENV,
                READER_ENV,
                {"OPENBLAS_NUM_THREADS": str(n_threads), "OMP_NUM_THREADS": str(n_threads)},
            )
        )
        _ask(theirs_whole, open_peer, PEER, path, inputs, n_threads, None)
        turns: dict[str, Callable[[], Any]] = {
            "ours": functools.partial(_ask, ours, profile_calls, str(library), inputs, ROUND_SEC),
            "ours whole": functools.partial(
                _ask, ours, time_exported, str(library), inputs, "cpu", ROUND_SEC
            ),
            "peer": functools.partial(
                _ask, theirs, profile_openvino, path, inputs, n_threads, ROUND_SEC
            ),
            "peer whole": functools.partial(_ask, theirs_whole, time_peer, ROUND_SEC),
            "roofline": functools.partial(_ask, roof, measure_roofline, n_threads),
        }
        found: dict[str, list[Any]] = {name: [] for name in turns}
        for number in range(rounds):
            # Forwards and backwards: none always comes after the same one.
            for name in list(turns)[:: -1 if number % 2 else 1]:
                time.sleep(SETTLE_SEC)
                found[name].append(turns[name]())
    roofline = Roofline(*map(max, zip(*found["roofline"], strict=True)))
    own = own_calls([calls for calls, _ in found["ours"]], works, roofline)
    nodes = median_nodes(found["peer"])
    whole_ms = (
        1e3 * statistics.median(found["ours whole"]),
        1e3 * statistics.median(found["peer whole"]),
    )
    instrument_ms = statistics.median(each for _, each in found["ours"])
    framework = PEERS[PEER].framework
    groups = match(own, [openvino_work(node) for node in nodes])
    return Profile(network.name, framework, n_threads, roofline, whole_ms, instrument_ms, groups)


def _pool(stack: contextlib.ExitStack, env: dict[str, str]) -> WorkerPool:
    pool = WorkerPool(1, env=env)
    stack.callback(pool.close)
    return pool


def _ask(pool: WorkerPool, function: Callable[..., Any], *task: Any) -> Any:
    (outcome,) = pool.map(function, [task], TIMEOUT_SEC)
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def own_calls(
    rounds: Sequence[Sequence[tuple[str, float]]],
    works: dict[str, tuple[Work, float]],
    roofline: Roofline,
) -> list[Work]:
    """Return the work of our functions with their times: medians of rounds, summed by function.

    Parameters
    ----------
    rounds : sequence of sequence of (str, float)
        Name and milliseconds of each call of an inference.
    works : dict of str to (Work, float)
        By the name of a function, and the bytes of a call.
    roofline : Roofline
    """
    names = [name for name, _ in rounds[0]]
    medians = [statistics.median(run[place][1] for run in rounds) for place in range(len(names))]
    n_calls = Counter(names)
    total_ms = dict.fromkeys(n_calls, 0.0)
    for name, ms in zip(names, medians, strict=True):
        total_ms[name] += ms
    if not n_calls.keys() & works.keys():
        raise InvalidOptionError(
            "The library has none of the functions that this version prepares: tune it again."
        )
    found = []
    for name, calls in n_calls.items():
        if name not in works:  # a function of TVM's runtime
            work = work_of_blocks(name, (), "", channels_last=False)
            found.append(dataclasses.replace(work, ms=total_ms[name], calls=calls))
            continue
        work, n_bytes = works[name]
        limit_ms = roofline.limit_ms(work.flop, n_bytes)
        found.append(dataclasses.replace(work, ms=total_ms[name], calls=calls, limit_ms=limit_ms))
    return found


def median_nodes(rounds: Sequence[Sequence[Node]]) -> list[Node]:
    """Return a peer's nodes with the medians of their times over rounds.

    OpenVINO numbers the nodes that it makes anew each time: only kinds and shapes stay.
    """
    found: dict[tuple[Any, ...], list[Node]] = {}
    for nodes in rounds:
        seen: Counter[Any] = Counter()
        for node in nodes:
            key = (node.kind, node.inputs, node.output)
            found.setdefault((*key, seen[key]), []).append(node)
            seen[key] += 1
    return [
        each[0]._replace(ms=statistics.median(node.ms for node in each)) for each in found.values()
    ]


def summary(profiles: Sequence[Profile]) -> str:
    """Return one line per network: both times, and what is behind of what both sides have."""
    rows = []
    for each in profiles:
        ours_ms, peer_ms = each.whole_ms
        shared = [group for group in each.groups if group.calls and group.peer_calls]
        behind_ms = sum(max(0.0, group.behind_ms) for group in shared)
        worst = "; ".join(f"{group.words} ({group.behind_ms:+.3f})" for group in shared[:1])
        rows.append(
            [
                each.model,
                f"{ours_ms:.3f}",
                f"{peer_ms:.3f}",
                f"{peer_ms / ours_ms:.2f}",
                f"{behind_ms:.3f}",
                worst,
            ]
        )
    head = ["network", "ours ms", "peer ms", "peer/ours", "groups behind ms", "furthest behind"]
    return aligned(head, rows)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="where the time goes, beside OpenVINO")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--top", type=int, default=20, help="rows of a table")
    parser.add_argument("--out", type=Path, help="write all groups to this JSON file")
    options = parser.parse_args(arguments)
    profiles = []
    for run in options.runs:
        try:
            profile = profile_run(run, options.rounds)
        except AdaptiveError as error:
            print(error, file=sys.stderr)
            continue
        profiles.append(profile)
        print(profile.title)
        print(table(profile.groups, profile.whole_ms, options.top, PEER), end="\n\n")
    if not profiles:
        return 2
    if len(profiles) > 1:
        print(summary(profiles))
    if options.out:
        write_figure(options.out, {"profiles": [profile.as_fields() for profile in profiles]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
