import json
import math

import numpy as np
import pytest

from tvm_adaptive.cost_model import storage
from tvm_adaptive.cost_model.dataset import Dataset
from tvm_adaptive.cost_model.storage import read_dataset, write_dataset
from tvm_adaptive.errors import ModelFileError


def example():
    rng = np.random.default_rng(0)
    dataset = Dataset()
    for key, n in (("a", 7), ("b", 3)):
        seconds = rng.uniform(1e-4, 1e-2, n)
        seconds[1] = math.nan
        rows = rng.normal(size=(n, 5)).astype(np.float32)
        dataset.add(key, rows, seconds, rng.uniform(0, 0.1, n))
    return dataset


def assert_same(one, other):
    assert [key for key, _ in one] == [key for key, _ in other]
    for (_, a), (_, b) in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.rows, b.rows)
        np.testing.assert_array_equal(a.seconds, b.seconds)
        np.testing.assert_array_equal(a.errors, b.errors)


def test_round_trip(tmp_path):
    path = tmp_path / "model.bin"  # TVM chooses the name; no suffix may be added
    write_dataset(path, example(), {"n_trees": 3})
    dataset, options = read_dataset(path)
    assert_same(dataset, example())
    assert options == {"n_trees": 3}
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.bin"]


def test_a_file_without_errors_is_read(tmp_path):
    write_dataset(tmp_path / "new", example(), {})
    with np.load(tmp_path / "new") as archive:
        kept = {name: archive[name] for name in archive.files if not name.startswith("errors")}
    with open(tmp_path / "old", "wb") as file:
        np.savez_compressed(file, **kept)
    dataset, _ = read_dataset(tmp_path / "old")
    for (_, old), (_, new) in zip(dataset, example(), strict=True):
        np.testing.assert_array_equal(old.seconds, new.seconds)
        assert (old.errors == 0).all()


def test_empty_round_trip(tmp_path):
    write_dataset(tmp_path / "m", Dataset(), {})
    assert len(read_dataset(tmp_path / "m")[0]) == 0


def test_an_existing_file_is_replaced_and_survives_a_failed_write(tmp_path, monkeypatch):
    path = tmp_path / "m"
    write_dataset(path, Dataset(), {})
    write_dataset(path, example(), {})

    def full_disk(file, **arrays):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(storage.np, "savez_compressed", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_dataset(path, Dataset(), {})
    assert_same(read_dataset(path)[0], example())
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_torn_file_is_refused(tmp_path, share):
    path = tmp_path / "m"
    write_dataset(path, example(), {})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ModelFileError, match="not a whole file"):
        read_dataset(path)


def test_a_changed_byte_is_never_read_as_other_data(tmp_path):
    path = tmp_path / "m"
    write_dataset(path, example(), {})
    whole = path.read_bytes()
    for position in range(0, len(whole), 37):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            dataset, _ = read_dataset(path)
        except ModelFileError:
            continue
        assert_same(dataset, example())  # a byte that carries no data, e.g. a date


def test_a_missing_file(tmp_path):
    with pytest.raises(ModelFileError, match="no such cost model file; check the path"):
        read_dataset(tmp_path / "nothing")


def test_another_version(tmp_path):
    header = json.dumps({"version": 99, "options": {}, "keys": []}).encode()
    np.savez(tmp_path / "m.npz", header=np.frombuffer(header, dtype=np.uint8))
    with pytest.raises(ModelFileError, match="format version 99, this package reads 1"):
        read_dataset(tmp_path / "m.npz")


def test_pickles_are_not_opened(tmp_path):
    np.savez(tmp_path / "m.npz", header=np.array([{"version": 1}], dtype=object))
    with pytest.raises(ModelFileError, match="allow_pickle"):
        read_dataset(tmp_path / "m.npz")
