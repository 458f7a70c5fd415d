"""Files of other programs, in a directory where a run or ``apply`` would replace them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tvm_adaptive._tvm import RPCConfig, tensor_functions_of
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import Network, TIRWorkload
from tvm_adaptive.models.frontend import slug


def refuse_foreign(folder: Path, names: Iterable[str], option: str) -> None:
    """Raise InvalidOptionError if a folder that is none of ours has something of these names."""
    for name in names:
        if (folder / name).exists():
            raise InvalidOptionError(
                f"{folder / name} would be replaced, but is of another program or of another use "
                f"of this one; name another directory with {option}."
            )


def library_names(model: Network | TIRWorkload, farm: RPCConfig | None) -> list[str]:
    """Return the names of the libraries of a network, or of each function of an operator."""
    if isinstance(model, Network):
        names = [slug(model.name)]
    else:
        names = [str(v.name_hint).replace("/", "_") for v, _ in tensor_functions_of(model.mod)]
    # A farm's device links an archive.
    suffixes = (".so",) if farm is None else (".so", ".tar")
    return [f"{name}{suffix}" for name in names for suffix in suffixes]
