"""From the names in a configuration to the objects that MetaSchedule runs with."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvm_adaptive._tvm import TuneContext, TuningRecord, module_key, runner_hooks, search_hooks
from tvm_adaptive.cost_model.surrogate import SurrogateOptions
from tvm_adaptive.errors import InvalidOptionError, check_share
from tvm_adaptive.models import is_gpu
from tvm_adaptive.runner.stopping import make_rule
from tvm_adaptive.search_strategy.options import SearchOptions
from tvm_adaptive.search_strategy.stoppable import StoppableSearch
from tvm_adaptive.search_strategy.strategy import searches_decisions
from tvm_adaptive.search_strategy.surrogate_proposer import draft_of
from tvm_adaptive.search_strategy.transfer import TransferPool
from tvm_adaptive.tuning import registry
from tvm_adaptive.tuning.config import MeasureConfig, TuneConfig
from tvm_adaptive.tuning.lanes.lanes import CPUS_PER_LANE, ProcessLanes, RayLanes
from tvm_adaptive.tuning.lanes.request import Lanes
from tvm_adaptive.tuning.lanes.search import ArtifactCache, CachedArtifactBuilder, LaneSearch
from tvm_adaptive.tuning.session import ARTIFACTS_FOLDER, RunContext, Session
from tvm_adaptive.tuning.target import FARM_RUNNERS, n_cores_of, rpc_config_of
from tvm_adaptive.values.trial_log import TrialLog
from tvm_adaptive.workers.cores import n_build_workers
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.scratch import PREFIX, remove_folder

# Medians of a compilation. Of ResNet-18's batches of 16 for an H100, the slowest took up to 15 s,
# that of the best candidate at most 4 s, twice the median.
_GPU_PATIENCE = 3.0
# Stock's build workers import TVM and every tensor intrinsic within their first candidate's
# seconds: 25 to 36 s on two quiet cores, three times that in a slow hour. One that is late
# is killed, its candidate counts as failed, and the next one imports anew.
STOCK_START_SEC = 105.0


@dataclasses.dataclass(frozen=True)
class Parts:
    """The five replaceable parts of a run, constructed, and what they share."""

    cost_model: Any
    strategy: Any  # each task gets a clone of it
    runner: Any
    builder: Any
    task_scheduler: Any
    transfer_pool: TransferPool | None  # None if the tasks' searches share no records
    trial_log: TrialLog  # shared by the parts that are ours
    work_dir: Path  # of the run, whose candidates are removed at the end
    closeable: tuple[Any, ...] = ()  # those that may have worker processes
    prefetch: bool = True  # whether drafts may prefetch large weights

    def draft(self, context: TuneContext, rng: np.random.Generator) -> TuningRecord | None:
        """Return a schedule for a task without trials; None where there is none."""
        pool = self.transfer_pool or TransferPool()
        return draft_of(context, rng, pool, prefetch=self.prefetch)

    def close(self) -> None:
        """End the worker processes of lanes, builder and runner; remove what they have left."""
        with contextlib.ExitStack() as stack:  # closes the others if one fails
            stack.callback(remove_candidates, self.work_dir)  # last of all
            for part in self.closeable:
                close = getattr(part, "close", None)  # stock has none
                if close is not None:
                    stack.callback(close)


def check_parts(config: TuneConfig) -> None:
    """Raise InvalidOptionError for options that a part would refuse, before a run begins."""
    names = registry.PARTS
    if config.strategy in names["strategy"].constructors:
        SearchOptions(**_search_options(config))
    if config.cost_model in names["cost_model"].constructors:
        SurrogateOptions(**dataclasses.asdict(config.model))
    if config.runner in names["runner"].constructors:
        make_rule(config.measure.rule)
    _check_foresight(config)
    if config.runner != "adaptive" and config.measure.devices != MeasureConfig.devices:
        raise InvalidOptionError(
            f"devices are those of runner adaptive, not of {config.runner}: leave them out."
        )
    for name in ("tracker", "tracker_key"):
        if config.runner not in FARM_RUNNERS and getattr(config.measure, name) is not None:
            raise InvalidOptionError(
                f"{name} is of the runners {' and '.join(FARM_RUNNERS)}, not of {config.runner}, "
                "which measures on this machine: leave it out, or name one of these."
            )
    if config.cost_model == "mlp" and importlib.util.find_spec("torch") is None:
        raise InvalidOptionError(
            'The cost model mlp needs PyTorch: pip install "tvm-adaptive[torch]".'
        )
    _check_lanes(config)


def make_parts(session: Session) -> Parts:
    """Construct the parts that a session's configuration names."""
    config, search, budget = session.config, session.config.search, session.budget
    remove_candidates(session.work_dir)  # of an attempt that was killed
    trial_log = TrialLog()
    cost_model = _cost_model(session, trial_log)
    transfer_pool = _transfer_pool(config, cost_model)
    strategy = _strategy(session, trial_log, transfer_pool)
    runner = _runner(session, trial_log)
    builder = _builder(session, trial_log)
    devices = runner_hooks(runner)
    n_devices = 1 if devices is None else devices.n_devices
    # After what may raise: a cluster that was joined would not be left.
    lanes = make_lanes(config, session.server)
    shares_cores = session.farm is None and not is_gpu(session.target)
    if lanes is not None and shares_cores and search.ray in (None, "local"):
        session.observer.note(
            "lanes search and build on the cores that are timed, which disturbs the times; leave "
            "lanes (ray) out where this machine's own CPU measures"
        )
    task_scheduler = _task_scheduler(session, n_devices, lanes)
    # Closed in the reverse order.
    closeable = (runner, builder, lanes)
    if lanes is not None:
        build = _build_options(session, session.work_dir)
        build["max_workers"] = _n_builders(session)
        cache = ArtifactCache(build.pop("artifact_dir"))
        strategy = LaneSearch(
            strategy,
            lanes,
            cache,
            build,
            session.journal,
            reduction_sketches=search.reduction_sketches,
            time_left=lambda: 0.0 if budget.interrupted else budget.search_left_sec,
        )
        builder = CachedArtifactBuilder(cache, builder)
    return Parts(
        cost_model=cost_model,
        strategy=StoppableSearch(
            strategy,
            session.should_stop,
            session.journal,
            on_round=budget.round_started,
            on_end=session.ended.add,
        ),
        runner=runner,
        builder=builder,
        task_scheduler=task_scheduler,
        transfer_pool=transfer_pool,
        trial_log=trial_log,
        prefetch=config.finish.prefetch,
        closeable=closeable,
        work_dir=session.work_dir,
    )


def remove_candidates(work_dir: Path) -> None:
    """Remove what batches and their workers have left; other files may be a user's."""
    for name in ("candidate-*", f"{PREFIX}*"):
        for folder in (work_dir / ARTIFACTS_FOLDER).glob(name):
            # A network file system removes the files of a worker that has ended a moment later.
            remove_folder(folder)


def _transfer_pool(config: TuneConfig, cost_model: Any) -> TransferPool | None:
    """Return what tasks share records in; None for a search that would not start from them."""
    search = config.search
    is_seeded = config.strategy == "adaptive" and search.seeds
    return TransferPool() if is_seeded and searches_decisions(search.proposer, cost_model) else None


def make_lanes(config: TuneConfig, server: ForkServer | None) -> Lanes | None:
    """Construct what searches and builds batches elsewhere; None for this process."""
    search = config.search
    _check_lanes(config)
    if search.ray is not None:
        return RayLanes(search.ray)
    return None if search.lanes == 1 else ProcessLanes(search.lanes, server)


def _check_foresight(config: TuneConfig) -> None:
    share = config.scheduler.foresee_share
    check_share("foresee_share", share, "(0, 1]")
    ours = registry.PARTS["cost_model"].constructors
    is_adaptive = (config.strategy, config.search.proposer) == ("adaptive", "surrogate")
    if share is not None and not (is_adaptive and config.cost_model in ours):
        raise InvalidOptionError(
            "foresee_share follows forecasts of the search: it needs strategy adaptive, its "
            f"proposer surrogate and cost model {' or '.join(ours)}, not {config.strategy}, "
            f"{config.search.proposer} and {config.cost_model}. Leave it out, or change these."
        )


def _check_lanes(config: TuneConfig) -> None:
    search = config.search
    if search.lanes == 1 and search.ray is None:
        return
    if (config.strategy, config.cost_model, search.proposer) != ("adaptive", "rfei", "surrogate"):
        raise InvalidOptionError(
            "Searching elsewhere (lanes, ray) needs strategy adaptive, its proposer surrogate "
            f"and cost model rfei, not {config.strategy}, {search.proposer} and "
            f"{config.cost_model}."
        )


def make_playoff_builder(
    context: RunContext, folder: Path, time_left: Callable[[], float] | None = None
) -> Any:
    """Construct our builder, whatever the configuration names: play-offs are held here."""
    options = {
        **_build_options(context, folder),
        # Finalists are known to build, and one of them is the best.
        "patience": None,
        "server": context.server,
        "time_left": time_left,
        "link": context.config.runner not in FARM_RUNNERS,
    }
    return registry.create("builder", "persistent", **options)


def _made(part: str, name: str, ours: dict[str, Any], stock: dict[str, Any]) -> Any:
    """Construct a part of ours, or one of stock's; the two take different options."""
    if name in registry.PARTS[part].constructors:
        return registry.create(part, name, **ours)
    base: Any = registry.PARTS[part].base
    return base.create(name, **stock)


def _cost_model(session: Session, trial_log: TrialLog) -> Any:
    n_cores = session.n_host_cores
    ours = {
        **dataclasses.asdict(session.config.model),
        "seed": session.seed,
        "n_jobs": n_cores,
        "trial_log": trial_log,
        "journal": session.journal,
    }
    return _made("cost_model", session.config.cost_model, ours, {"num_tuning_cores": n_cores})


def _strategy(session: Session, trial_log: TrialLog, transfer_pool: TransferPool | None) -> Any:
    ours = _search_options(session.config)
    ours |= {"trial_log": trial_log, "transfer_pool": transfer_pool, "journal": session.journal}
    return _made("strategy", session.config.strategy, ours, {})


def _search_options(config: TuneConfig) -> dict[str, Any]:
    options = dataclasses.asdict(config.search)
    # MetaSchedule's own, and the run's.
    for name in ("n_trials_per_round", "seeds", "lanes", "ray", "reduction_sketches"):
        del options[name]
    # Only our builder compiles it.
    prefetch = config.finish.prefetch and config.builder == "persistent"
    return {**options, "prefetch": prefetch}


def _runner(session: Session, trial_log: TrialLog) -> Any:
    measure, name = session.config.measure, session.config.runner
    overlap = measure.overlap
    if overlap is None:
        overlap = name in FARM_RUNNERS or is_gpu(session.target)
    ours = {
        **_shared(session, trial_log),
        "rule": measure.rule,
        "timeout_sec": measure.timeout_sec,
        "overlap": overlap,
        "race": measure.race,
    }
    if name == "adaptive":
        ours |= {
            "n_threads": n_cores_of(session.target),
            "devices": measure.device_indices,
            "duet": measure.duet,
        }
    elif name == "adaptive-rpc":
        ours["rpc_config"] = rpc_config_of(measure)
        ours["earlier_speeds"] = session.history.board_speeds
    stock: dict[str, Any] = {}
    if name == "rpc":
        stock["rpc_config"] = rpc_config_of(measure)
    elif name == "local":
        stock["timeout_sec"] = measure.timeout_sec + STOCK_START_SEC
    return _made("runner", name, ours, stock)


def _builder(session: Session, trial_log: TrialLog) -> Any:
    measure = session.config.measure
    ours = {
        **_build_options(session, session.work_dir),
        **_shared(session, trial_log),
        "link": session.config.runner not in FARM_RUNNERS,
    }
    stock: dict[str, Any] = {"timeout_sec": measure.build_timeout_sec + STOCK_START_SEC}
    if n_cores_of(session.target) is not None:
        stock["max_workers"] = n_build_workers(session.n_host_cores)
    return _made("builder", session.config.builder, ours, stock)


def _task_scheduler(session: Session, n_devices: int, lanes: Lanes | None) -> Any:
    ours = {
        **dataclasses.asdict(session.config.scheduler),
        "seed": session.seed,
        "max_waiting": n_devices,
        "n_lanes": 1 if lanes is None else lanes.n_lanes,
        "on_end": session.ended.add,
        "journal": session.journal,
    }
    if is_gpu(session.target):
        # Compiling for a GPU takes a second, timing a hundredth: no build worker is left idle.
        n_workers = n_build_workers(session.n_host_cores)
        n_first = min(n_workers, session.config.search.n_trials_per_round)
        ours["warm_up_trials"] = max(n_first, session.config.scheduler.warm_up_trials)
    return _made("task_scheduler", session.config.task_scheduler, ours, {})


def _build_options(context: RunContext, folder: Path) -> dict[str, Any]:
    """Return options of our builder that can be sent to another machine."""
    patience = context.config.measure.build_patience
    if patience is not None and is_gpu(context.target):
        patience = min(patience, _GPU_PATIENCE)
    return {
        "timeout_sec": context.config.measure.build_timeout_sec,
        "patience": patience,
        "artifact_dir": folder / ARTIFACTS_FOLDER,
        "max_workers": n_build_workers(context.n_host_cores),
    }


def _n_builders(context: RunContext) -> int:
    """Return the compile workers that a batch has: lanes of this machine share its cores."""
    search = context.config.search
    if search.ray is not None:
        return CPUS_PER_LANE
    return max(1, n_build_workers(context.n_host_cores) // search.lanes)


def _shared(session: Session, trial_log: TrialLog) -> dict[str, Any]:
    """Return the options that our runner and our builder share."""
    return {
        "server": session.server,
        "time_left": lambda: session.budget.search_left_sec,
        "trial_log": trial_log,
        "journal": session.journal,
    }


def build_sec_of(session: Session, parts: Parts) -> Callable[[Any], float]:
    """Return what tells the seconds of a candidate's build in one process; NaN if not known."""
    # Not the parts: the task scheduler would hold itself by its callbacks, through C++.
    n_workers, trial_log = _n_builders(session), parts.trial_log

    def find(candidate: Any) -> float:
        share_sec = trial_log.get(module_key(candidate.sch.mod)).build_sec
        return math.nan if share_sec is None else n_workers * share_sec

    return find


def forget_tasks(contexts: Sequence[TuneContext]) -> None:
    """Let searches release their tasks, also where MetaSchedule has not come to ending them."""
    for context in contexts:
        search_hooks(context.search_strategy).forget_task()
