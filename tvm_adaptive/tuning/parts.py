"""From the names in a configuration to the objects that MetaSchedule runs with."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    Builder,
    CostModel,
    RPCConfig,
    Runner,
    SearchStrategy,
    Target,
    TaskScheduler,
    runner_hooks,
)
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.journal import JournalWriter
from tvm_adaptive.models import is_gpu
from tvm_adaptive.search_strategy.stoppable import StoppableSearch
from tvm_adaptive.search_strategy.transfer import TransferPool
from tvm_adaptive.tuning import registry
from tvm_adaptive.tuning.config import MeasureConfig, TuneConfig
from tvm_adaptive.tuning.lanes.artifact_cache import ArtifactCache, CachedArtifactBuilder
from tvm_adaptive.tuning.lanes.base import Lanes
from tvm_adaptive.tuning.lanes.process_lanes import ProcessLanes
from tvm_adaptive.tuning.lanes.ray_lanes import RayLanes
from tvm_adaptive.tuning.lanes.search import LaneSearch
from tvm_adaptive.tuning.target import n_cores_of
from tvm_adaptive.values.trial_log import TrialLog
from tvm_adaptive.workers.cores import n_build_workers, usable_physical_cores
from tvm_adaptive.workers.fork_server import ForkServer

# Those that measure on the machine that builds, and those that measure behind a tracker.
LOCAL_RUNNERS = ("adaptive", "local")
FARM_RUNNERS = ("adaptive-rpc", "rpc")
# Stock's build workers import TVM and every tensor intrinsic within their first candidate's
# seconds: 25 to 36 s on two quiet cores, three times that in a slow hour. One that is late
# is killed, its candidate counts as failed, and the next one imports anew.
STOCK_START_SEC = 105.0


@dataclasses.dataclass(frozen=True)
class Parts:
    """The five replaceable parts of a run, constructed."""

    cost_model: Any  # ``strategy`` is the pattern that each task gets a clone of
    strategy: Any
    runner: Any
    builder: Any
    task_scheduler: Any
    transfer_pool: (
        TransferPool | None
    )  # what the tasks' searches tell one another; None where they do not
    trial_log: TrialLog  # shared by the parts that are ours
    lanes: Lanes | None = None  # where batches are searched and built, if not in this process

    def close(self) -> None:
        """End the worker processes of builder, runner and lanes, where they are ours."""
        for part in (self.lanes, self.builder, self.runner):
            with contextlib.suppress(AttributeError):
                part.close()  # type: ignore[union-attr]


def check_names(config: TuneConfig) -> None:
    """Raise unless every part's name is known."""
    for part in registry.PARTS:
        name = getattr(config, part)
        if name not in registry.names(part):
            raise InvalidOptionError(
                f"Unknown {part.replace('_', ' ')} {name!r}; possible are "
                f"{', '.join(registry.names(part))}."
            )


def make_parts(
    config: TuneConfig,
    *,
    target: Target,
    work_dir: Path,
    seed: int,
    journal: JournalWriter,
    should_stop: Callable[[], bool],
    server: ForkServer | None = None,
    time_left: Callable[[], float] | None = None,
) -> Parts:
    """Construct the parts that a configuration names."""
    transfer_pool = TransferPool() if _takes_seeds(config) else None
    trial_log = TrialLog()
    ours = _our_options(
        config,
        target=target,
        work_dir=work_dir,
        seed=seed,
        journal=journal,
        server=server,
        time_left=time_left,
        trial_log=trial_log,
    )
    ours["strategy"]["transfer_pool"] = transfer_pool
    stock = _stock_options(n_cores_of(target), config.measure)
    bases = {
        "cost_model": CostModel,
        "strategy": SearchStrategy,
        "runner": Runner,
        "builder": Builder,
        "task_scheduler": TaskScheduler,
    }
    lanes = make_lanes(config, server)
    made: dict[str, Any] = {}
    for part, base in bases.items():
        name = getattr(config, part)
        if part == "task_scheduler":
            devices = runner_hooks(made["runner"])
            ours[part]["max_waiting"] = 1 if devices is None else devices.n_devices
            ours[part]["n_lanes"] = 1 if lanes is None else lanes.n_lanes
        if name in registry.PARTS[part].constructors:
            made[part] = registry.create(part, name, **ours[part])
        else:
            made[part] = base.create(name, **stock[part])
    if lanes is not None:
        build = _build_options(config, target, work_dir, None)
        shelf = ArtifactCache(build.pop("artifact_dir"))
        # What cannot travel.
        del build["server"], build["time_left"]
        made["strategy"] = LaneSearch(
            made["strategy"], lanes, shelf, build, journal, time_left=time_left
        )
        made["builder"] = CachedArtifactBuilder(shelf, made["builder"])
    made["strategy"] = StoppableSearch(made["strategy"], should_stop, journal)
    return Parts(**made, transfer_pool=transfer_pool, trial_log=trial_log, lanes=lanes)


def _takes_seeds(config: TuneConfig) -> bool:
    search = config.search
    return config.strategy == "adaptive" and search.proposer == "distilled" and search.seeds


def make_lanes(config: TuneConfig, server: ForkServer | None) -> Lanes | None:
    """Make the places where batches are searched and built; None for this process."""
    search = config.search
    if search.lanes == 1 and search.ray is None:
        return None
    if (config.strategy, config.cost_model, search.proposer) != ("adaptive", "rfei", "distilled"):
        raise InvalidOptionError(
            "Searching elsewhere (lanes, ray) needs strategy adaptive, its proposer distilled "
            f"and cost model rfei, not {config.strategy}, {search.proposer} and "
            f"{config.cost_model}."
        )
    if search.ray is not None:
        return RayLanes(search.ray)
    return ProcessLanes(search.lanes, server)


def make_builder(
    config: TuneConfig,
    target: Target,
    work_dir: Path,
    *,
    server: ForkServer | None = None,
    time_left: Callable[[], float] | None = None,
) -> Any:
    """Construct our builder, whatever the configuration names; for the play-offs, held here."""
    options = _build_options(config, target, work_dir, server, time_left)
    # What is built here is known to build, and may be the best there is.
    options["patience"] = None
    return registry.create(
        "builder", "persistent", **options, link=config.runner not in FARM_RUNNERS
    )


def farm_of(config: TuneConfig) -> RPCConfig | None:
    """Return where the devices are that a configuration measures on; None for here."""
    if config.runner not in FARM_RUNNERS:
        return None
    from tvm_adaptive.runner.rpc.runner import complete_config

    return complete_config(_rpc_config(config.measure))


def _build_options(
    config: TuneConfig,
    target: Target,
    work_dir: Path,
    server: ForkServer | None,
    time_left: Callable[[], float] | None = None,
) -> dict[str, Any]:
    return {
        "timeout_sec": config.measure.build_timeout_sec,
        "patience": config.measure.build_patience,
        "artifact_dir": work_dir / "artifacts",
        "max_workers": n_build_workers(n_cores_of(target) or usable_physical_cores()),
        "server": server,
        "time_left": time_left,
    }


def _our_options(
    config: TuneConfig,
    target: Target,
    *,
    work_dir: Path,
    seed: int,
    journal: JournalWriter,
    server: ForkServer | None,
    time_left: Callable[[], float] | None,
    trial_log: TrialLog,
) -> dict[str, dict[str, Any]]:
    n_cores = n_cores_of(target)
    search = dataclasses.asdict(config.search)
    # MetaSchedule's own, and the run's.
    for name in ("n_trials_per_round", "seeds", "lanes", "ray"):
        del search[name]
    return {
        "cost_model": {
            **dataclasses.asdict(config.model),
            "seed": seed,
            "n_jobs": n_cores,
            "trial_log": trial_log,
            "journal": journal,
        },
        "strategy": {
            **search,
            "trial_log": trial_log,
            "journal": journal,
        },
        "runner": {
            **_runner_options(config, target),
            "server": server,
            "trial_log": trial_log,
            "race": config.measure.race,
            "time_left": time_left,
            "journal": journal,
        },
        "builder": {
            **_build_options(config, target, work_dir, server, time_left),
            "link": config.runner in LOCAL_RUNNERS,
            "trial_log": trial_log,
            "journal": journal,
        },
        "task_scheduler": {
            **dataclasses.asdict(config.scheduler),
            "seed": seed,
            "journal": journal,
        },
    }


def _runner_options(config: TuneConfig, target: Target) -> dict[str, Any]:
    options: dict[str, Any] = {
        "rule": config.measure.rule,
        "timeout_sec": config.measure.timeout_sec,
        "overlap": config.measure.overlap,
    }
    if config.runner == "adaptive":
        options |= {"n_threads": n_cores_of(target), "devices": config.measure.device_indices}
    elif config.runner == "adaptive-rpc":
        options |= {"rpc_config": _rpc_config(config.measure)}
    if options["overlap"] is None:
        options["overlap"] = config.runner not in LOCAL_RUNNERS or is_gpu(target)
    return options


def _rpc_config(measure: MeasureConfig) -> RPCConfig:
    """Return where the devices are; TVM takes what is None from the environment."""
    host, _, port = (measure.tracker or "").rpartition(":")
    return RPCConfig(
        tracker_host=host or None,
        tracker_port=int(port) if port else None,
        tracker_key=measure.tracker_key,
        session_timeout_sec=math.ceil(measure.timeout_sec),
    )


def _stock_options(n_cores: int | None, measure: MeasureConfig) -> dict[str, dict[str, Any]]:
    builder: dict[str, Any] = {"timeout_sec": measure.build_timeout_sec + STOCK_START_SEC}
    return {
        "cost_model": {} if n_cores is None else {"num_tuning_cores": n_cores},
        "strategy": {},
        "runner": {},
        "builder": builder
        if n_cores is None
        else {**builder, "max_workers": n_build_workers(n_cores)},
        "task_scheduler": {},
    }
