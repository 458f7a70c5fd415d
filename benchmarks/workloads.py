"""What is tuned, and how long: tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.choosing import choose


@dataclasses.dataclass(frozen=True)
class Workload:
    """Something to tune.

    Attributes
    ----------
    name : str
        As ``tvm_adaptive.tune`` takes it.
    what : str
        In a few words.
    is_network : bool
    is_held_out : bool
        Whether no constant of this package was chosen by runs of this operator.
    """

    name: str
    what: str
    is_network: bool = False
    is_held_out: bool = False


# To add a workload, add an entry.
_ALL: tuple[Workload, ...] = (
    Workload("te:C1D", "1-D convolution"),
    Workload("te:C2D", "2-D convolution"),
    Workload("te:C3D", "3-D convolution", is_held_out=True),
    Workload("te:GMM", "matrix product"),
    Workload("te:GRP", "grouped convolution", is_held_out=True),
    Workload("te:DIL", "dilated convolution", is_held_out=True),
    Workload("te:DEP", "depthwise convolution"),
    Workload("te:T2D", "transposed convolution"),
    Workload("te:CAP", "capsule convolution", is_held_out=True),
    Workload("te:NRM", "norm of a matrix", is_held_out=True),
    Workload("te:SFM", "softmax"),
    Workload("te:CBR", "convolution, batch norm, ReLU", is_held_out=True),
    Workload("te:TBG", "batched product of transposed matrices"),
    Workload("te:C2D:2", "2-D convolution, 14 x 14, 256 channels"),
    Workload("te:GMM:2", "matrix product, 512 cubed"),
    Workload("te:T2D:2", "transposed convolution, 16 x 16, 128 channels"),
    Workload("te:NRM:2", "norm of a matrix, 1024 squared", is_held_out=True),
    Workload("resnet18", "ResNet-18", is_network=True),
    Workload("resnet34", "ResNet-34", is_network=True),
    Workload("resnet50", "ResNet-50", is_network=True),
    Workload("vgg16", "VGG-16", is_network=True),
    Workload("squeezenet1_1", "SqueezeNet 1.1", is_network=True),
    Workload("transformer", "Transformer encoder", is_network=True),
    Workload("mobilenet_v2", "MobileNet-V2", is_network=True),
    Workload("bert_base", "BERT-base encoder", is_network=True),
)
WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ALL}

WORKLOAD_SETS: dict[str, tuple[str, ...]] = {
    "operators": tuple(
        each.name for each in _ALL if not each.is_network and each.name.count(":") == 1
    ),
    "sizes": tuple(each.name for each in _ALL if each.name.count(":") == 2),
    "networks": tuple(each.name for each in _ALL if each.is_network),
    "core": ("te:C2D", "te:GMM", "te:DEP", "te:T2D", "te:TBG", "te:C1D"),
}


@dataclasses.dataclass(frozen=True)
class Size:
    """How much of everything.

    Attributes
    ----------
    workloads, methods : tuple of str
        Names or sets.
    n_seeds : int
    trials : int
        Of each run of an operator.
    network_sec : float
        Wall-clock seconds of each run of a network.
    noise_sec : float
        Seconds that the machine's noise is measured for.
    rounds : int
        Rounds of the neutral re-measurement.
    """

    workloads: tuple[str, ...]
    methods: tuple[str, ...]
    n_seeds: int
    trials: int
    network_sec: float
    noise_sec: float
    rounds: int


# Of a run whose options say what is tuned: timed anew as often as any published figure.
UNNAMED = Size(("te:GMM",), ("main",), 1, 256, 600.0, 60.0, 21)
SIZES: dict[str, Size] = {
    # Shows that the harness works, and nothing else.
    "smoke": Size(("te:GMM",), ("main",), 1, 8, 60.0, 2.0, 3),
    "small": Size(("core", "resnet18"), ("equal-time",), 3, 256, 600.0, 60.0, 15),
    # Ours against all of stock's baselines.
    "operators": Size(("operators", "sizes"), ("baselines",), 3, 256, 600.0, 60.0, 21),
    # What the first trials begin with.
    "start": Size(("operators",), ("start",), 3, 32, 600.0, 60.0, 21),
}


def choose_workloads(words: Sequence[str]) -> tuple[Workload, ...]:
    """Return the workloads that names of workloads and of sets stand for, each once.

    Raises
    ------
    ValueError
        For a word that is neither.
    """
    return choose("workload", words, WORKLOADS, WORKLOAD_SETS)
