"""A dataset on disk: one ``.npz`` file without pickles.

Entries: ``header`` (JSON in UTF-8 bytes: format version, options, keys of the tasks in
order) and for task i ``rows_i`` (float32, (n, d)), ``seconds_i`` (float64, (n,), NaN for
failures) and ``errors_i`` (float64, (n,), relative standard errors of the seconds; missing
in older files). The forest itself is not stored: it is grown again from the data, which is
faster than reading it and cannot disagree with them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from tvm_adaptive.cost_model.dataset import Dataset
from tvm_adaptive.errors import ModelFileError

FORMAT_VERSION = 1


def write_dataset(path: Path, dataset: Dataset, options: dict[str, Any]) -> None:
    """Write a dataset; a reader sees the old file or the new one, never half of it."""
    keys = [key for key, _ in dataset]
    header = json.dumps({"version": FORMAT_VERSION, "options": options, "keys": keys})
    arrays: dict[str, Any] = {"header": np.frombuffer(header.encode(), dtype=np.uint8)}
    for i, (_, task) in enumerate(dataset):
        arrays[f"rows_{i}"] = task.rows
        arrays[f"seconds_{i}"] = task.seconds
        arrays[f"errors_{i}"] = task.errors
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.savez_compressed(file, **arrays)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_dataset(path: Path) -> tuple[Dataset, dict[str, Any]]:
    """Read what :func:`write_dataset` wrote."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            header = json.loads(archive["header"].tobytes().decode())
            if header["version"] != FORMAT_VERSION:
                raise ModelFileError(
                    f"{path} has format version {header['version']}, this package reads "
                    f"{FORMAT_VERSION}. Update tvm_adaptive, or start without the file."
                )
            dataset = Dataset()
            for i, key in enumerate(header["keys"]):
                rows, seconds = archive[f"rows_{i}"], archive[f"seconds_{i}"]
                errors = archive.get(f"errors_{i}")
                dataset.add(str(key), rows.astype(np.float32), seconds.astype(np.float64), errors)
            return dataset, dict(header["options"])
    except ModelFileError:
        raise
    except FileNotFoundError as error:
        raise ModelFileError(
            f"{path}: there is no such cost model file; check the path."
        ) from error
    # A damaged archive makes its reader raise nearly anything (zlib, zip, JSON, shapes).
    except Exception as error:
        raise ModelFileError(
            f"{path} is not a whole file of this cost model ({type(error).__name__}: {error}). "
            "The model in memory is unchanged; load another file or start without one."
        ) from error
