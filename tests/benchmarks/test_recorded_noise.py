from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.micro.recorded_noise import (
    RESULTS_FOLDER,
    Recording,
    factors_of,
    read_recordings,
)


def test_the_noise_is_that_of_ratios_within_a_round() -> None:
    rng = np.random.default_rng(0)
    speeds = rng.uniform(0.5, 2.0, (400, 1))
    alike = np.repeat(speeds, 4, axis=1)
    assert Recording("same", alike).noise == pytest.approx(0.0, abs=1e-12)
    noisy = alike * np.exp(rng.normal(0.0, 0.1, alike.shape))
    assert Recording("noisy", noisy).noise == pytest.approx(0.1 * np.sqrt(2.0), rel=0.1)


def test_libraries_that_share_their_rounds_are_one_recording() -> None:
    timed = {
        "a": dict.fromkeys(range(9), 2.0) | dict.fromkeys(range(9, 12), 4.0),
        "another day": dict.fromkeys(range(20, 32), 5.0),
        "b": dict.fromkeys(range(12), 1.0),
        "late": {11: 1.0},
        "the same day": dict.fromkeys(range(20, 32), 7.0),
    }
    first, second = factors_of(timed)
    assert first.tolist() == [[1.0, 1.0]] * 9 + [[2.0, 1.0]] * 3
    assert second.tolist() == [[1.0, 1.0]] * 12
    assert factors_of({"a": {0: 1.0}, "b": {0: 1.0}}) == []
    assert factors_of({"alone": dict.fromkeys(range(12), 1.0)}) == factors_of({}) == []


def test_rounds_of_either_format_are_read(tmp_path: Path) -> None:
    former, present = tmp_path / "bench" / "te-GMM", tmp_path / "deeper" / "bench" / "te-SFM"
    former.mkdir(parents=True)
    samples = {"a": [2.0] * 6 + [4.0] * 5, "b": [1.0] * 11, "c": [1.0]}
    entries: dict[str, object] = {name: {"samples_ms": each} for name, each in samples.items()}
    entries["d"] = {"error": "failed"}
    (former / "neutral.json").write_text(json.dumps({"entries": entries}))
    present.mkdir(parents=True)
    lines = [{"event": "round", "ms": {"a": 3.0, "b": 2.0}, "errors": {}}] * 10
    (present / "neutral.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = {each.name: each.factors.tolist() for each in read_recordings(tmp_path)}
    assert found == {
        "bench/te-GMM": [[1.0, 1.0]] * 6 + [[2.0, 1.0]] * 5,
        "deeper/bench/te-SFM": [[1.0, 1.0]] * 10,
    }


def test_published_rounds_are_read() -> None:
    recordings = read_recordings(RESULTS_FOLDER)
    assert {"operators-anew/te-GMM", "resnet18/resnet18"} <= {each.name for each in recordings}
    assert sum(len(each.factors) for each in recordings) > 100
    factors = [np.median(each.factors) for each in recordings]
    assert factors == pytest.approx(np.ones(len(factors)), abs=0.02)
