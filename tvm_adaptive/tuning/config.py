"""All options of a run, as frozen values with two named presets.

``DEFAULT`` is the best of our benchmarks; ``PAPER`` is AdaTune (Li et al., NeurIPS 2020) and
DynaTune (Zhang et al., ICLR 2021) as published. Where the two differ, the attribute has the
reason. What ``PAPER`` does otherwise than the papers or their released code:

==================  ==================================  =====================================
of                  published                           here
==================  ==================================  =====================================
search space        AutoTVM's templates and knobs       MetaSchedule's sketches and traces
features            of loops (AutoTVM)                  of stores (MetaSchedule); copies and
                                                        constants dropped
target              FLOP/s                              throughput over the task's best, in
                                                        the same order
forest              one per task                        one for all tasks of a run
search              simulated annealing                 MetaSchedule's evolution
bags of the forest  as many draws as samples            fewer beyond 320 samples
refit               after each batch                    after 5 % more samples of all tasks:
                                                        beyond 640, not after each batch
samples             all trials                          at most 8,192: the fastest of each
                                                        task, and some of the others
failed builds       learned as 0, like all failures     not learned, as in MetaSchedule
                    (AdaTune's code)
first batch         epsilon 0.05                        half random, half by the model of the
                                                        tasks before
score               expected improvement; at sigma 0    a rising function of its logarithm;
                    max(0, mu - best)                   sigma at least 0.01 of the best
epsilon             may exceed 1 (AdaTune's code)       clipped at 1 (DynaTune's code)
micro-batches       no least number                     three
time of a trial     mean of all micro-batches           trimmed mean of them
tuning curves       unbounded priors; chains start      uniform priors within bounds; starts
                    within 1e-6 of the best fit         spread over 5 % of them
end of a run        best record                         play-off, as in all runs
==================  ==================================  =====================================
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any, TypeVar

from tvm_adaptive.errors import InvalidOptionError, check_at_least, check_positive, check_share
from tvm_adaptive.tuning.option_types import convert_types

_Options = TypeVar("_Options", "SearchConfig", "MeasureConfig", "SchedulerConfig", "TuneConfig")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """The search for candidates.

    Attributes
    ----------
    n_trials_per_round : int, default 16
        Candidates per batch. Small batches let the model learn sooner; below 16 the
        fixed cost of a search round outweighs that.
    proposer, genetic_num_iters, epsilon, diversity
        As in :class:`~tvm_adaptive.search_strategy.options.SearchOptions`.
    population_size : int, default 128
        Schedules per generation. Of a round of 16 trials, stock's 512 spend more
        seconds on mutation and features than on building and measuring.
    lanes : int, default 1
        Processes of this machine that search and build at the same time, each a batch of
        another task; for devices other than this machine's CPU. 1 is this process.
    ray : str or None, default None
        Address of a Ray cluster that searches and builds instead: ``"host:port"``,
        ``"auto"``, or ``"local"`` for one on this machine.
    seeds : bool, default True
        Whether a quarter of a task's first batch (without analytical candidates, up to
        half of it) are the best of the tasks of its family, fitted to its own extents.
        See :mod:`tvm_adaptive.search_strategy.transfer`.
    n_analytical : int, default 8
        Candidates that a model of the processor prefers, which the rest of these trials are
        taken from; 0 takes random ones. See :mod:`tvm_adaptive.search_strategy.analytical`.
    reduction_sketches : bool, default True
        Whether means over an image, global pooling and the like also have sketches that
        reduce vectors of the last axis, which MetaSchedule's rules do not make, and
        transforms of Winograd's tiles have vectors that registers hold. On CPUs.
    """

    n_trials_per_round: int = 16
    proposer: str = "surrogate"
    population_size: int = 128
    genetic_num_iters: int = 3
    epsilon: float | None = None
    diversity: str = "medoids"
    lanes: int = 1
    ray: str | None = None
    seeds: bool = True
    n_analytical: int = 8
    reduction_sketches: bool = True

    def __post_init__(self) -> None:
        convert_types(self)
        check_at_least("n_trials_per_round", self.n_trials_per_round, 1)
        check_at_least("population_size", self.population_size, 1)
        check_at_least("genetic_num_iters", self.genetic_num_iters, 0)
        check_at_least("lanes", self.lanes, 1)
        check_at_least("n_analytical", self.n_analytical, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The forest of the cost model.

    Attributes
    ----------
    n_trees : int, default 24
        The paper's 10 trees give a standard deviation that is mostly noise; 100 rank
        little better than 24 and take more seconds than stock's model.
    std : {"shrunk", "between-tree", "total", "jackknife"}, default "shrunk"
        See :mod:`tvm_adaptive.cost_model.forest`; ``"between-tree"`` is the paper's.
    max_features : float or int, default 1/3
        Features tried at a split: a share of those that vary, at most 48, or a number, as in
        AdaTune's released code.
    target : {"root", "log", "throughput"}, default "root"
        See :mod:`tvm_adaptive.cost_model.targets`: ``"root"`` finds faster candidates of
        recorded pools sooner than ``"log"`` and ranks those of other tasks better.
    """

    n_trees: int = 24
    std: str = "shrunk"
    max_features: float | int = 1 / 3
    target: str = "root"

    def __post_init__(self) -> None:
        convert_types(self)
        check_at_least("n_trees", self.n_trees, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Building and timing of candidates.

    Attributes
    ----------
    rule : {"precision", "paper", "cv"}, default "precision"
    timeout_sec : float, default 10.0
        Deadline for one candidate's runs; a kernel that needs longer never wins.
    build_timeout_sec : float, default 15.0
        Deadline for one candidate's build. Most compile in a fifth of a second; one that
        unrolls without end must not cost a twentieth of a ten-minute budget. Stock's builder
        gets 105 s more: its workers import TVM and all tensor intrinsics in that time.
    build_patience : float or None, default 10.0
        A build that takes this many times the median is stopped; for GPUs at most three
        times. See :class:`~tvm_adaptive.PersistentBuilder`.
    race : bool, default True
        Whether candidates that are clearly slower than the fastest of their task are
        dropped after a few runs.
    duet : bool, default True
        Whether a fast candidate of the task is timed again with every batch, and times are
        corrected by it: changes of the machine's speed cancel, and a lucky time is noticed.
        Takes at most 3 % of the search. For the runner ``"adaptive"`` on one device.
    devices : str, default "0"
        Which local devices of the target's kind measure, each in a process of its own:
        ``"0,1"`` are the first two. They must be alike. For the runner ``"adaptive"``.
    tracker : str or None, default None
        ``"HOST:PORT"`` of the RPC tracker for the runner ``"adaptive-rpc"``; None takes
        ``TVM_TRACKER_HOST`` and ``TVM_TRACKER_PORT``.
    tracker_key : str or None, default None
        The tracker's key of the devices; None takes ``TVM_TRACKER_KEY``.
    overlap : bool or None, default None
        Whether the next batch, of another task, is searched and built while one is
        measured; None means if another device or machine measures: on GPUs and by RPC.
    """

    rule: str = "precision"
    timeout_sec: float = 10.0
    build_timeout_sec: float = 15.0
    build_patience: float | None = 10.0
    race: bool = True
    duet: bool = True
    devices: str = "0"
    tracker: str | None = None
    tracker_key: str | None = None
    overlap: bool | None = None

    def __post_init__(self) -> None:
        convert_types(self)
        check_positive("timeout_sec", self.timeout_sec)
        check_positive("build_timeout_sec", self.build_timeout_sec)
        check_at_least("build_patience", self.build_patience, 1)
        if not re.fullmatch(r"\d+(,\d+)*", self.devices):
            raise InvalidOptionError(
                f"devices must be numbers with commas between, as in 0,1, but got {self.devices!r}."
            )
        if len(set(self.device_indices)) < len(self.device_indices):
            raise InvalidOptionError(
                f"devices {self.devices!r} name one twice: two kernels would share it while they "
                "are timed."
            )
        if self.tracker is not None and not re.fullmatch(r".+:\d+", self.tracker):
            raise InvalidOptionError(
                f"tracker must be HOST:PORT, as in farm:9190, but got {self.tracker!r}."
            )

    @property
    def device_indices(self) -> tuple[int, ...]:
        """Return ``devices`` as numbers."""
        return tuple(int(index) for index in self.devices.split(","))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The division of tuning time among tasks, by a task scheduler of ours.

    Attributes
    ----------
    preset : {"default", "paper"}, default "default"
        The variant of ``"dynatune"``: ours, or as published.
    slot_rounds : int, default 1
        Batches per decision. A decision costs milliseconds, a batch seconds.
    slot_sec : float or None, default None
        Seconds per decision instead, as in the paper.
    warm_up_trials : int, default 4
        Trials of a task before the first decision on it; a whole slot in the paper.
    patience_trials : int or None, default None
        A task without improvement for this many trials gets no more; None leaves that to
        the scheduler (as published: 200).
    foresee_share : float or None, default None
        Each slot is followed by one of this share of its trials, for the sibling task that
        the model expects most of; None gives none. Needs strategy ``"adaptive"`` with proposer
        ``"surrogate"``, and cost model ``"rfei"`` or ``"rfei-family"``.
    plateau_slots : int or None, default None
        The search ends when as many slots saved no more than ``plateau_share``.
    plateau_share : float, default 0.005
        Of the network's latency; less than that is hard to measure again.
    """

    preset: str = "default"
    slot_rounds: int = 1
    slot_sec: float | None = None
    warm_up_trials: int = 4
    patience_trials: int | None = None
    foresee_share: float | None = None
    plateau_slots: int | None = None
    plateau_share: float = 0.005

    def __post_init__(self) -> None:
        convert_types(self)
        if self.preset not in ("default", "paper"):
            raise InvalidOptionError(f"preset must be default or paper but got {self.preset!r}.")
        check_at_least("slot_rounds", self.slot_rounds, 1)
        check_at_least("warm_up_trials", self.warm_up_trials, 1)
        check_positive("slot_sec", self.slot_sec)
        check_at_least("patience_trials", self.patience_trials, 1)
        check_at_least("plateau_slots", self.plateau_slots, 1)
        check_share("plateau_share", self.plateau_share)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishConfig:
    """The choice of the winners at the end.

    Attributes
    ----------
    top_k : int, default 3
        Candidates per task that are checked and measured again at length.
    n_qualifiers : int, default 64
        Candidates that are timed again, shortly and side by side, before these are chosen;
        0 for none. Tasks share them in proportion to their latency. The best of thousands
        of short timings are lucky ones.
    max_share : float, default 0.05
        Share of a wall-clock budget that the timings of all play-offs may take; qualifying
        may take as much again. Where only tasks that are worth it have a play-off
        (``within_network``), there are as many as a tenth of the budget has room for at 1.7 s
        each, each takes at most the seconds in which a search would bring as much, and
        ``max_share`` bounds their qualifying alone.
    max_task_sec : float, default 8.0
        Seconds that the timings of one play-off may take; builds and checks come on top.
    prefetch : bool, default True
        Whether the fastest candidates with large constant weights, and winners, may prefetch
        them, if that is faster: up to 14 % for a kernel. See :mod:`tvm_adaptive.models.prefetch`.
    within_network : bool, default True
        Whether only tasks whose play-off is worth its time have one, in a network on this
        machine's CPU with a budget in seconds; see :mod:`tvm_adaptive.tuning.stakes`. The
        best records of the others are checked together, in one inference of the network.
    rtol : float, default 1e-3
        Largest relative difference of outputs, for float32; see ``values.agreement``.
    """

    top_k: int = 3
    n_qualifiers: int = 64
    max_share: float = 0.05
    max_task_sec: float = 8.0
    prefetch: bool = True
    within_network: bool = True
    rtol: float = 1e-3

    def __post_init__(self) -> None:
        convert_types(self)
        check_at_least("top_k", self.top_k, 1)
        check_at_least("n_qualifiers", self.n_qualifiers, 0)
        check_positive("max_share", self.max_share)
        check_positive("max_task_sec", self.max_task_sec)
        check_positive("rtol", self.rtol)

    @property
    def is_loosened(self) -> bool:
        """Whether outputs may differ by more than others who share a store expect."""
        return self.rtol > FinishConfig.rtol


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """A whole run: its parts, and the options of each.

    Attributes
    ----------
    cost_model, strategy, runner, builder, task_scheduler : str
        Names, ours or stock's.
    scheduler : SchedulerConfig
        Used when ``task_scheduler`` is one of ours.
    layout : {"auto", "keep", "NHWC"}, default "auto"
        Layout of a network's convolutions while it is tuned.
    prepack : bool or None, default None
        Whether each schedule may choose the layout of its constant weights; None means
        on CPUs. Measured on ResNet-18: 16 % lower latency of the whole network, see
        ``benchmarks/README.md``.
    vector_math : bool or None, default None
        Whether ``exp``, ``tanh``, ``erf`` and functions of them are computed by
        polynomials, which vectorize (relative error below 4e-7); None means on CPUs.
    forms : bool or None, default None
        Whether convolutions of 3 x 3 with stride 1 also compete in forms with fewer
        operations (Winograd's), as tasks of their own; None means with channels last on CPUs,
        under our task scheduler's default preset.
    store : str, default "user"
        Where trials are kept for later runs, which begin with the best of them: ``"user"``
        is a file below the home directory, ``"none"`` keeps and recalls nothing, anything
        else is a path or a database's URL; ``"env:NAME"`` takes the URL, which may hold a
        password, from an environment variable.
    starter : bool, default True
        Whether a run also begins with the package's own records of common operators; see
        :mod:`tvm_adaptive.tuning.starter`. Not with ``store="none"``.
    use_all : bool, default False
        Whether the search goes on until the budget is spent or no task promises a gain.
        Otherwise it also ends when its second half has saved less than can be seen; see
        :class:`~tvm_adaptive.tuning.stakes.Plateau`.
    peers : str, default ""
        Frameworks that are timed beside the tuned network, besides the model's own, with
        commas between: ``"ort"``, ``"openvino"``, ``"torch"``, ``"inductor"``.
    """

    cost_model: str = "rfei"
    strategy: str = "adaptive"
    runner: str = "adaptive"
    builder: str = "persistent"
    task_scheduler: str = "dynatune"
    search: SearchConfig = SearchConfig()
    model: ModelConfig = ModelConfig()
    measure: MeasureConfig = MeasureConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    finish: FinishConfig = FinishConfig()
    layout: str = "auto"
    prepack: bool | None = None
    vector_math: bool | None = None
    forms: bool | None = None
    store: str = "user"
    starter: bool = True
    use_all: bool = False
    peers: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.store, os.PathLike):
            object.__setattr__(self, "store", os.fspath(self.store))
        convert_types(self)

    @property
    def preparation(self) -> dict[str, Any]:
        """Return the options of :func:`~tvm_adaptive.models.prepare`."""
        found = {name: getattr(self, name) for name in ("layout", "prepack", "vector_math")}
        if self.forms is None:
            # Other schedulers would give every form the trials of a task that is needed.
            ours = self.task_scheduler == "dynatune" and self.scheduler.preset == "default"
            return {**found, "forms": ours}
        return {**found, "forms": self.forms}

    def replace(self, **changes: Any) -> TuneConfig:
        """Return a copy with attributes changed; None keeps one, InvalidOptionError if unknown."""
        known = {field.name for field in dataclasses.fields(self)}
        if unknown := sorted(set(changes) - known):
            raise InvalidOptionError(
                f"Unknown option {', '.join(unknown)}; possible are {', '.join(sorted(known))}."
            )
        return replaced(self, **changes)


def replaced(options: _Options, **changes: Any) -> _Options:
    """Return a copy of options with some changed; None keeps an option."""
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(options, **given)


DEFAULT = TuneConfig()
PAPER = TuneConfig(
    # 32 per plan and 10 trees: AdaTune's released code; stock's population otherwise.
    search=SearchConfig(
        n_trials_per_round=32,
        proposer="evolution",
        population_size=512,
        genetic_num_iters=4,
        diversity="none",
        seeds=False,
        n_analytical=0,
        reduction_sketches=False,
    ),
    model=ModelConfig(n_trees=10, std="between-tree", max_features=10, target="throughput"),
    measure=MeasureConfig(
        rule="paper",
        timeout_sec=100.0,
        build_patience=None,
        race=False,
        duet=False,
        overlap=False,
    ),
    # The slot of DynaTune's released example.
    scheduler=SchedulerConfig(preset="paper", slot_sec=20.0),
    finish=FinishConfig(within_network=False),
    prepack=False,
    vector_math=False,
    forms=False,
    store="none",
    starter=False,
    use_all=True,
)
PRESETS: dict[str, TuneConfig] = {"default": DEFAULT, "paper": PAPER}


def preset(name: str) -> TuneConfig:
    """Return a preset by name; raise InvalidOptionError if there is none of that name."""
    if name not in PRESETS:
        raise InvalidOptionError(f"Unknown preset {name!r}; possible are {', '.join(PRESETS)}.")
    return PRESETS[name]
