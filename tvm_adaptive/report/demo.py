"""A kept run: ResNet-18 with a budget of 60 seconds on two cores."""

from __future__ import annotations

import lzma
import tempfile
from pathlib import Path

from tvm_adaptive.measure_callback.journal import JOURNAL_FILE
from tvm_adaptive.report.history import RunHistory, read_run

DEMO_JOURNAL = Path(__file__).with_name("demo.jsonl.xz")


def read_demo() -> RunHistory:
    """Return the kept run's history."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / JOURNAL_FILE).write_bytes(lzma.decompress(DEMO_JOURNAL.read_bytes()))
        history = read_run(Path(folder))
    history.name = f"{history.run['what']} (a kept run)"
    return history
