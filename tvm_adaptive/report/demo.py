"""A recorded run: ResNet-18 with a budget of four minutes on two cores."""

from __future__ import annotations

import lzma
import tempfile
from pathlib import Path

from tvm_adaptive.measure_callback.journal import JOURNAL_FILE
from tvm_adaptive.report.history import RunHistory, read_run

_PACKED = Path(__file__).with_name("demo.jsonl.xz")


def unpack_demo(folder: Path) -> None:
    """Write the recorded run's journal to a folder."""
    (folder / JOURNAL_FILE).write_bytes(lzma.decompress(_PACKED.read_bytes()))


def read_demo() -> RunHistory:
    """Return the recorded run's history."""
    with tempfile.TemporaryDirectory() as folder:
        unpack_demo(Path(folder))
        history = read_run(Path(folder))
    history.name = f"{history.run['what']} (a recorded run)"
    return history
