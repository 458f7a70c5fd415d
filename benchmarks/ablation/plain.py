"""Run the command line with some rewrites of models turned off, which no option does.

python -m benchmarks.ablation.plain operators,fusion tune net.onnx --budget 60s
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm_adaptive.cli import main as command_line


def _same(mod: Any) -> Any:
    return mod


def _none(_asked: Any) -> None:
    return None


# Of each part, what takes the place of functions in ``models.prepare``.
PARTS: Mapping[str, Mapping[str, Callable[[Any], Any]]] = {
    "operators": {"vector_unit_of": _none, "is_grouped": _none},
    "fusion": dict.fromkeys(
        ("fold_affine", "with_numbers_as_data", "without_equal_broadcasts"), _same
    ),
}


def turn_off(parts: Sequence[str]) -> None:
    """Prepare models without some parts in this process from now on."""
    # The package has a function of the same name.
    prepare = importlib.import_module("tvm_adaptive.models.prepare")
    for part in parts:
        for name, instead in PARTS[part].items():
            if not hasattr(prepare, name):
                raise AttributeError(f"{prepare.__name__} has no {name} any more; see {__file__}")
            setattr(prepare, name, instead)


if __name__ == "__main__":
    turn_off(sys.argv[1].split(","))
    sys.exit(command_line(sys.argv[2:]))
