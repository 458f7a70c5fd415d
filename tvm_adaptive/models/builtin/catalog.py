"""Networks and operators that can be tuned by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tvm_adaptive._tvm import TVM_VERSION, IRModule, te_workload, te_workload_names
from tvm_adaptive.errors import InvalidOptionError, check_choices
from tvm_adaptive.models.builtin.encoder import bert_base, transformer
from tvm_adaptive.models.builtin.mobilenet import mobilenet_v2
from tvm_adaptive.models.builtin.resnet import resnet18, resnet34, resnet50
from tvm_adaptive.models.builtin.squeezenet import squeezenet1_1
from tvm_adaptive.models.builtin.vgg import vgg16
from tvm_adaptive.models.network import Network

# To add a network, write its factory in a file of its own and add it here.
BUILTIN: dict[str, Callable[[], Network]] = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "squeezenet1_1": squeezenet1_1,
    "mobilenet_v2": mobilenet_v2,
    "vgg16": vgg16,
    "transformer": transformer,
    "bert_base": bert_base,
}
_TE = "te:"


@dataclasses.dataclass(frozen=True)
class TIRWorkload:
    """One operator."""

    name: str
    mod: IRModule  # one tensor function, ``main``


def load_workload(what: str) -> Network | TIRWorkload:
    """Return a network or an operator by its name; ``"te:GMM:2"`` is the third size of GMM."""
    if what in BUILTIN:
        return BUILTIN[what]()
    name, colon, size = what.removeprefix(_TE).partition(":")
    known = [*BUILTIN, *(_TE + each for each in te_workload_names())]
    check_choices("workload", _TE + name if what.startswith(_TE) else what, known)
    try:
        if colon and not size.isdecimal():
            raise IndexError
        return TIRWorkload(what, te_workload(name, int(size or 0)))
    except IndexError:
        raise InvalidOptionError(
            f"te:{name} has no size {size!r}; sizes are numbers from 0 on."
        ) from None
    except RuntimeError as error:  # the Winograd convolution uses what TVM has removed
        raise InvalidOptionError(
            f"TVM {TVM_VERSION} cannot build its own workload {what} ({error}); choose another."
        ) from error
