from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.scheduler.recordings import FORMAT_VERSION, load_recording, save_recording
from tests.testing.test_recording import make_recording, make_task
from tvm_adaptive.errors import InvalidOptionError


def test_it_survives_being_written(tmp_path):
    path = tmp_path / "net.npz"
    recording = make_recording(make_task(), make_task("dense", [1.5, 1.25], sizes=[2]))
    save_recording(recording, path)
    loaded = load_recording(path)
    for name in ("network", "batch", "machine", "tvm", "seed"):
        assert getattr(loaded, name) == getattr(recording, name)
    for ours, theirs in zip(recording.tasks, loaded.tasks, strict=True):
        assert (ours.name, ours.weight, ours.flop) == (theirs.name, theirs.weight, theirs.flop)
        for name in ("latencies_ms", "trial_sec", "round_sizes", "overhead_sec"):
            before, after = getattr(ours, name), getattr(theirs, name)
            assert after.dtype == before.dtype
            np.testing.assert_allclose(after, before, rtol=1e-6)


def test_it_is_small(tmp_path, rng):
    tasks = [make_task(f"task{k}", rng.lognormal(size=1600), sizes=[16] * 100) for k in range(10)]
    save_recording(make_recording(*tasks), tmp_path / "net.npz")
    # Seven digits of 16,000 latencies and seconds, compressed.
    assert (tmp_path / "net.npz").stat().st_size < 16_000 * 8


def test_a_damaged_file_says_so(tmp_path):
    path = tmp_path / "net.npz"
    save_recording(make_recording(), path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(InvalidOptionError, match=r"net\.npz is no recording, or is damaged"):
        load_recording(path)
    path.write_text("hello")
    with pytest.raises(InvalidOptionError, match="Record it again"):
        load_recording(path)
    with pytest.raises(InvalidOptionError, match="There is no recording at"):
        load_recording(tmp_path / "other.npz")


def rewritten(path, change):
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(str(arrays.pop("header")))
    change(header)
    np.savez_compressed(path, header=np.array(json.dumps(header)), **arrays)


def test_another_version_says_so(tmp_path):
    path = tmp_path / "net.npz"
    save_recording(make_recording(), path)
    rewritten(path, lambda header: header.update(version=FORMAT_VERSION + 1))
    with pytest.raises(InvalidOptionError, match=f"version {FORMAT_VERSION + 1}.*reads"):
        load_recording(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.pop("machine"),
        lambda header: header["tasks"][0].pop("flop"),
        lambda header: header["tasks"][0].update(n_trials=4),
        lambda header: header["tasks"][0].update(weight=-1.0),
    ],
)
def test_a_contradiction_says_so(tmp_path, change):
    path = tmp_path / "net.npz"
    save_recording(make_recording(), path)
    rewritten(path, change)
    with pytest.raises(InvalidOptionError, match=r"contradicts itself.*Record it again"):
        load_recording(path)
