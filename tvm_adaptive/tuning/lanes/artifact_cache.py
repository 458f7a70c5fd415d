"""Where what lanes have built waits until MetaSchedule asks its builder for it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    BuilderInput,
    BuilderResult,
    PyBuilder,
    derived_object,
    module_key,
)
from tvm_adaptive.builder.compile import ARCHIVE_NAME
from tvm_adaptive.tuning.lanes.request import Built


class ArtifactCache:
    """Results of builds by their programs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results: dict[int, BuilderResult] = {}

    def put(self, built: Built) -> None:
        """Keep what was built of a program, or why it was not."""
        if built.artifact is None:
            self._results[built.key] = BuilderResult(None, built.error)
            return
        directory = Path(tempfile.mkdtemp(prefix="candidate-", dir=self._folder))
        path = directory / ARCHIVE_NAME
        path.write_bytes(built.artifact)
        self._results[built.key] = BuilderResult(str(path), None)

    def take(self, key: int) -> BuilderResult | None:
        """Return and forget what was built of a program; None if nothing was."""
        return self._results.pop(key, None)


@derived_object
class CachedArtifactBuilder(PyBuilder):  # type: ignore[misc]
    """Hands out what is on the shelf, and has the rest built here."""

    def __init__(self, shelf: ArtifactCache, inner: Any) -> None:
        super().__init__()
        self._shelf = shelf
        self._inner = inner

    def build(self, build_inputs: list[BuilderInput]) -> list[BuilderResult]:
        """Return a result per input, in their order."""
        inputs = list(build_inputs)
        found = [self._shelf.take(module_key(each.mod)) for each in inputs]
        missing = [each for each, result in zip(inputs, found, strict=True) if result is None]
        rest = iter(self._inner.build(missing) if missing else ())
        return [next(rest) if result is None else result for result in found]

    def close(self) -> None:
        """End the inner builder's workers."""
        self._inner.close()
