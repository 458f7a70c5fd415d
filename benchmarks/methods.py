"""What is compared: each method is data, an entry of one table.

A method is either stock MetaSchedule, called by its own function with its own defaults,
or ``tvm_adaptive.tune`` with some options changed. Options are written as in
``tvm_adaptive.tuning.config``, those of a stage with a dot: ``"search.epsilon"``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks.choosing import choose

STOCK = "stock"
TUNE = "tune"


@dataclasses.dataclass(frozen=True)
class Method:
    """One way of tuning.

    Attributes
    ----------
    name : str
        For the command line, tables and folders.
    what : str
        In a few words, for the reader of a table.
    tuner : {"tune", "stock"}
        ``tvm_adaptive.tune``, or MetaSchedule's own ``tune_tasks``.
    preset : str
        Of ``tvm_adaptive.tuning.config``; what ``changes`` start from.
    changes : mapping of str to value
        Options that differ from the preset. Stock takes only those that
        say how a network is prepared.
    trials_factor : int
        Times the trials that a benchmark gives an operator: what is cheap per trial can
        go on for about as long as the baseline.
    batch : int
        Candidates per round, of stock only.
    post_optimization : bool
        Whether stock goes on with MetaSchedule's ``post_optimization`` after its trials.
    starter : {"", "other-tasks", "other-processor"}
        What starter records a run begins with: none, those without the workload's own, or of
        these the ones that were measured with another instruction set, as if they were of this
        one.
    """

    name: str
    what: str
    tuner: str = TUNE
    preset: str = "default"
    changes: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    trials_factor: int = 1
    batch: int = 64
    post_optimization: bool = False
    starter: str = ""


# Stock would give every form the trials of a task that is needed.
_ONE_FORM: Mapping[str, Any] = MappingProxyType({"forms": False})
# Stock's parts and sizes, called by ``tvm_adaptive.tune``: what the ladder starts from.
STOCK_PARTS: dict[str, Any] = {
    **_ONE_FORM,
    "cost_model": "xgb",
    "strategy": "evolutionary",
    "runner": "local",
    "builder": "local",
    "task_scheduler": "gradient",
    "search.n_trials_per_round": 64,
    "search.proposer": "evolution",
    "search.diversity": "none",
    "search.seeds": False,
    "search.n_analytical": 0,
    "search.reduction_sketches": False,
    "search.population_size": 512,
    "search.genetic_num_iters": 4,
    "measure.race": False,
    "measure.duet": False,
    "measure.build_patience": None,
}
# AdaTune, section 5.3, then our own; each rung keeps what the ones before changed.
LADDER: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ladder-0", "stock's parts, called by tune", {}),
    ("ladder-1", "+ rfei", {"cost_model": "rfei"}),
    ("ladder-2", "+ adaptive epsilon", {"strategy": "adaptive"}),
    ("ladder-3", "+ adaptive runner", {"runner": "adaptive"}),
    ("ladder-4", "+ persistent builder", {"builder": "persistent"}),
    ("ladder-5", "+ dynatune", {"task_scheduler": "dynatune"}),
    ("ladder-6", "+ search on knobs", {"search.proposer": "surrogate"}),
    ("ladder-7", "+ races", {"measure.race": True}),
    ("ladder-8", "+ patience with builds", {"measure.build_patience": 10.0}),
    ("ladder-9", "+ seeds of the family", {"search.seeds": True}),
    ("ladder-10", "+ duet timing", {"measure.duet": True}),
    ("ladder-11", "+ sketches of reductions", {"search.reduction_sketches": True}),
    ("ladder-12", "+ analytical candidates", {"search.n_analytical": 8}),
    ("ladder-13", "+ forms of convolutions", {"forms": None}),
)
EPSILONS = (0.01, 0.05, 0.2, 0.5)
# In batches of 16 a share of 0.01 is no candidate at all.
EPSILON_BATCH: dict[str, Any] = {"search.n_trials_per_round": 64}


def _ladder() -> list[Method]:
    changes = dict(STOCK_PARTS)
    rungs = []
    for name, what, step in LADDER:
        changes = {**changes, **step}
        rungs.append(Method(name, what, changes=MappingProxyType(changes)))
    return rungs


def _with(name: str, what: str, **changes: Any) -> Method:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return Method(name, what, changes=MappingProxyType(dotted))


AS_IT_IS: dict[str, Any] = {"layout": "keep", "prepack": False, "vector_math": False}

# To add a method, add an entry.
_ALL: tuple[Method, ...] = (
    Method("stock", "MetaSchedule as it comes", tuner=STOCK, changes=_ONE_FORM),
    Method("stock-16", "stock, batches of 16", tuner=STOCK, changes=_ONE_FORM, batch=16),
    Method(
        "stock-post",
        "stock with post_optimization",
        tuner=STOCK,
        changes=_ONE_FORM,
        post_optimization=True,
    ),
    Method("default", "ours"),
    Method("with-starter", "ours, others' starter records", starter="other-tasks"),
    # Ours takes a fifth of stock's seconds per trial on the core operators, a tenth on one.
    Method("long", "ours, four times the trials", trials_factor=4),
    Method(
        "long-with-starter",
        "ours, others' starter records, four times the trials",
        trials_factor=4,
        starter="other-tasks",
    ),
    Method(
        "foreign-starter",
        "ours, others' starter records of another instruction set",
        starter="other-processor",
    ),
    _with("no-start", "neither starter nor analytical candidates", search__n_analytical=0),
    Method(
        "starter-only",
        "others' starter records, no analytical candidates",
        changes=MappingProxyType({"search.n_analytical": 0}),
        starter="other-tasks",
    ),
    Method("paper", "AdaTune and DynaTune as published", preset="paper"),
    *_ladder(),
    _with("epsilon-adaptive", "adaptive epsilon, batches of 64", **EPSILON_BATCH),
    *(
        _with(f"epsilon-{share:g}", f"epsilon {share:g}", search__epsilon=share, **EPSILON_BATCH)
        for share in EPSILONS
    ),
    _with("no-race", "ours, every candidate measured in full", measure__race=False),
    _with("no-seeds", "ours, no candidates of relatives", search__seeds=False),
    # FamilySeer's two ideas, one at a time and together; ours is "default" with seeds.
    _with(
        "family-model",
        "no seeds, a forest per family",
        search__seeds=False,
        cost_model="rfei-family",
    ),
    _with("foresee", "no seeds, foresee slots", search__seeds=False, scheduler__foresee_share=0.25),
    _with(
        "family-foresee",
        "no seeds, forests per family and foresee slots",
        search__seeds=False,
        cost_model="rfei-family",
        scheduler__foresee_share=0.25,
    ),
    _with("no-dynatune", "ours with the gradient scheduler", task_scheduler="gradient"),
    _with("round-robin", "ours, round robin", task_scheduler="round-robin"),
    _with("as-it-is", "ours, network as it is", **AS_IT_IS),
    _with("nhwc", "ours, NHWC, weights not packed", layout="NHWC", prepack=False),
    _with("no-vector-math", "ours, exp and the like by the C library", vector_math=False),
)
METHODS: dict[str, Method] = {method.name: method for method in _ALL}

METHOD_SETS: dict[str, tuple[str, ...]] = {
    "main": ("stock", "default"),
    "equal-time": ("stock", "long"),
    "baselines": ("stock", "stock-16", "stock-post", "long", "long-with-starter"),
    # The first 32 trials; "default" has analytical candidates only, "with-starter" both.
    "start": ("no-start", "starter-only", "default", "with-starter"),
    "presets": ("stock", "default", "paper"),
    "ladder": ("stock", *(name for name, _, _ in LADDER), "default"),
    "epsilon": ("epsilon-adaptive", *(f"epsilon-{share:g}" for share in EPSILONS)),
    "families": ("no-seeds", "family-model", "foresee", "family-foresee", "default"),
}


def choose_methods(words: Sequence[str]) -> tuple[Method, ...]:
    """Return the methods that names of methods and of sets stand for, each once.

    Raises
    ------
    ValueError
        For a word that is neither.
    """
    return choose("method", words, METHODS, METHOD_SETS)
