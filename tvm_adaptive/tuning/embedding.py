"""From a model to a function of this process: compiled from records, or tuned first."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import IRModule, Target
from tvm_adaptive.database.metaschedule import target_text
from tvm_adaptive.database.store import open_store
from tvm_adaptive.errors import (
    InvalidOptionError,
    MachineError,
    StoreError,
    WorkerError,
    check_at_least,
)
from tvm_adaptive.models import Network
from tvm_adaptive.models.content import content_of, python_source
from tvm_adaptive.models.frontend import (
    ModelReader,
    Sample,
    load,
    network_of_imported,
    network_of_module,
    read_sample,
    shapes_of_sample,
    with_sample,
)
from tvm_adaptive.models.frontend.torch_flat import evaluated
from tvm_adaptive.models.inference import CompiledModel, check_pool
from tvm_adaptive.tuning.config import DEFAULT, TuneConfig
from tvm_adaptive.tuning.deploy import apply_network
from tvm_adaptive.tuning.observer import Observer
from tvm_adaptive.tuning.outcome import Comparison, TuneReport
from tvm_adaptive.tuning.session import RunOptions, worker_server
from tvm_adaptive.tuning.target import environment_of, n_threads_of, resolve_target
from tvm_adaptive.tuning.tune import run_loaded
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.scratch import ScratchFolder

logger = logging.getLogger(__name__)

# Of the calls of an inference, for a model that was not tuned here: records of less were made
# for other models. Of one that was, any proven record will do: a short run reaches few tasks.
_LEAST_PROVEN_SHARE = 0.5
_ANY_SHARE = 1e-9
_NAME = "model"


def compile_model(
    model: Any,
    *,
    inputs: Any = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    params: Mapping[str, Any] | None = None,
    budget_sec: float | None = None,
    trials: int | None = None,
    seed: int | None = None,
    config: TuneConfig = DEFAULT,
    observer: Observer | None = None,
    work_dir: str | Path | None = None,
    n_threads: int | None = None,
) -> CompiledModel:
    """Return a network as a function that runs in this process.

    A network that was tuned by an earlier call, on this machine and with this TVM, is compiled
    from the checked records in ``config.store``, without a search; so is one of which half of
    the calls have checked records there. With a looser ``finish.rtol`` than the default, only
    the latter is. Otherwise it is tuned, which fills the store, and the result of
    that is used. Networks count as the same if operators, shapes and types are; weights may
    differ. To search again, call :func:`~tvm_adaptive.tune` with the same store.

    Only kernels whose outputs agree with those of the untuned function are compiled, and
    the outputs of the network are compared with those of its framework, or of the untuned
    network, if the budget leaves time for it. A network that computes something else, or that
    cannot be run, is an error.

    Parameters
    ----------
    model : str, path, IRModule, Network or torch.nn.Module
        What :func:`~tvm_adaptive.tune` and :func:`~tvm_adaptive.tune_relax` take; operators
        (``"te:C2D"``) are not networks. A ``torch.nn.Module`` is used in evaluation mode,
        with the weights that it has now.
    inputs : optional
        For a ``torch.nn.Module``, its example inputs: a tensor, a sequence of arguments, or a
        mapping of keyword arguments. Otherwise as in :func:`~tvm_adaptive.tune`.
    input_shapes : mapping of str to sequence of int, or None, default None
    params : mapping of str to Tensor, or None, default None
        Weights of an IRModule.
    budget_sec : float or None, default None
        Seconds of a search. Without ``budget_sec`` and ``trials`` there is none, and records
        of less of the network are enough. Compilation from records is not counted.
    trials : int or None, default None
    seed, config, observer
        As in :func:`~tvm_adaptive.tune`.
    work_dir : path or None, default None
        Keeps the run in ``run`` and what was compiled from records in ``applied``; None takes
        a temporary directory, which is removed with the returned object.
    n_threads : int or None, default None
        Threads of a kernel; None takes the cores of this machine that kernels are tuned for.

    Returns
    -------
    CompiledModel
        Says what it guarantees: fixed shapes and types, number of threads, thread safety.

    Raises
    ------
    InvalidOptionError
        For a model or option that cannot be used; without a budget, also if the store has no
        record of the model.
    ImportMismatchError
        When an imported network computes something else in TVM than in its framework.
    StoreError
        When a store other than the user's own cannot be opened.
    WorkDirInUseError
        When another run uses ``work_dir``.
    WorkerError
        When no library could be compiled or run, or its outputs are wrong; a MachineError when
        the search ended because the disk is full or the machine fails.
    """
    check_at_least("n_threads", n_threads, 1)
    check_at_least("seed", seed, 0)
    check_pool()
    target = resolve_target("cpu")
    folder, keep = _folder(work_dir)
    bounded = functools.partial(RunOptions, budget_sec=budget_sec, trials=trials, seed=seed)
    make_options = functools.partial(
        bounded, work_dir=folder / "run", config=config, observer=observer
    )
    searches = budget_sec is not None or trials is not None
    if searches:
        make_options(what=_NAME)  # raises before the model is read
    with worker_server() as server:
        network = network_of(model, inputs, input_shapes, params, server)
        least_share, key = 0.0, ""
        if searches:
            key = _key_of(network, target, config)
            least_share = _ANY_SHARE if _was_tuned(key, config) else _LEAST_PROVEN_SHARE
        applied = None
        with _unless_searching(searches):
            applied = apply_network(
                network,
                out_dir=folder / "applied",
                config=config,
                observer=observer,
                least_proven_share=least_share,
                server=server,
                keeps_journal=work_dir is not None,
            )
        if applied is not None:
            library, comparison, shortfall = applied
        else:
            options = make_options(what=network.name)
            report, library = _tuned_library(network, options, key, server)
            comparison, shortfall = report.comparison, report.shortfall
    _check_agreement(network, comparison, shortfall)
    return CompiledModel(
        library,
        network.input_shapes,
        network.input_dtypes,
        n_threads=n_threads or n_threads_of(target),
        example=network.inputs(),
        keep=keep,
    )


def _was_tuned(key: str, config: TuneConfig) -> bool:
    """Whether an earlier call has tuned what has this key; without one, nobody knows."""
    found = False
    if key:
        with open_store(config.store) as store, _unless_searching(searches=True):
            found = store is not None and store.was_tuned(key)
    return found


@contextlib.contextmanager
def _unless_searching(searches: bool) -> Iterator[None]:
    """Let a store that cannot be read cost a search its records only, as ``tune`` does."""
    try:
        yield
    except StoreError as error:
        if not searches:
            raise
        logger.warning("%s The network is tuned without its records.", error)


def _tuned_library(
    network: Network, options: RunOptions, key: str, server: ForkServer
) -> tuple[TuneReport, Path]:
    """Tune a network, and note in the store that this was done."""
    report = run_loaded(options, lambda _: (network, python_source(network)), server=server)
    if report.machine_failure:
        raise MachineError(
            f"The search of {network.name} ended early: {report.machine_failure}. Mend that, then "
            "call compile again."
        )
    if report.interrupted:
        raise KeyboardInterrupt
    if report.failure:  # the library is an earlier one, or untuned
        raise WorkerError(f"The tuned {network.name} could not be compiled: {report.failure}")
    with contextlib.suppress(StoreError), open_store(options.config.store) as store:
        if store is not None and key:
            store.note_tuned(key)
    if report.library is None:
        raise WorkerError(f"{network.name} could not be compiled: {report.shortfall}")
    return report, report.library


def network_of(
    model: Any,
    inputs: Any = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    params: Mapping[str, Any] | None = None,
    server: ForkServer | None = None,
) -> Network:
    """Return what :func:`compile_model` takes as a network; raise InvalidOptionError."""
    shapes: Mapping[str, Sequence[int]] = dict(input_shapes or {})
    if params and not isinstance(model, IRModule):
        raise InvalidOptionError("params are the weights of an IRModule; omit them.")
    if isinstance(model, Network):
        if shapes:
            raise InvalidOptionError("A Network has its shapes; omit input_shapes.")
        return model if inputs is None else with_sample(model, read_sample(inputs), "inputs")
    if isinstance(model, IRModule):
        arrays = None if inputs is None else read_sample(inputs)
        if arrays is not None:
            shapes = shapes_of_sample(arrays, shapes, "inputs")
        found = network_of_imported(_NAME, model, shapes, params=dict(params or {}))
        return found if arrays is None else with_sample(found, arrays, "inputs")
    if isinstance(model, (str, Path)):
        given: Sample | None = inputs
        loaded = load(str(model), shapes, inputs=given, reader=ModelReader(server))
        if not isinstance(loaded, Network):
            raise InvalidOptionError(f"{model} is an operator; tune it with tune_tir instead.")
        return loaded
    if not (hasattr(model, "forward") and hasattr(model, "eval")):
        raise InvalidOptionError(
            "model must be a file, a name, an IRModule, a Network or a torch.nn.Module but is "
            f"{type(model).__name__}."
        )
    if inputs is None:
        raise InvalidOptionError("A torch.nn.Module needs example inputs: inputs=...")
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if named else tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)
    name = type(model).__name__
    with evaluated(model):
        return network_of_module(model, args, named, name=name, shapes=shapes, source=name)


def _folder(work_dir: str | Path | None) -> tuple[Path, object]:
    """Return a directory, and what removes it when it is dropped."""
    if work_dir is not None:
        return Path(work_dir), None
    keep = ScratchFolder("compile")
    return keep.path, keep


def _key_of(network: Network, target: Target, config: TuneConfig) -> str:
    """Return what a network is known by in a store once it was tuned here; "" for none."""
    # What only a loosened tolerance let pass is not in the store: the search begins again.
    content = "" if config.finish.is_loosened else content_of(network)
    environment = environment_of(target, config)
    where = [target_text(target), environment.device, environment.tvm, environment.tvm_ffi]
    return content and hashlib.sha256(json.dumps([content, *where]).encode()).hexdigest()


def _check_agreement(network: Network, comparison: Comparison | None, shortfall: str) -> None:
    if comparison is None and not shortfall:
        raise WorkerError(
            f"The compiled {network.name}, or what it is compared with, could not be run; the "
            "journal says why, which work_dir keeps."
        )
    if comparison is not None and not comparison.agree:
        raise WorkerError(
            f"The compiled {network.name} computes something else: {comparison.problem}. If that "
            "is rounding, allow more of it with finish.rtol."
        )
