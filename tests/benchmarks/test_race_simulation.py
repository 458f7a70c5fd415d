from __future__ import annotations

import numpy as np
import pytest

from benchmarks.micro.race_simulation import (
    RUNS_FILE,
    Hour,
    ReplayTimer,
    estimated_noise,
    recorded_runs,
    share_dropped,
)

QUIET = np.full(50, 1e-4)


def test_a_replay_repeats_all_runs_in_their_order() -> None:
    runs = np.array([1.0, 2.0, 3.0])
    timer = ReplayTimer(runs, 2.0, np.random.default_rng(0))
    means = timer(1, 6)
    start = [2.0, 4.0, 6.0].index(means[0])
    assert means == [2.0 * runs[(start + k) % 3] for k in range(6)]
    assert timer.now_sec == pytest.approx(sum(means))
    assert timer(300, 1) == [pytest.approx(4.0)]


@pytest.mark.parametrize(
    ("candidate", "noise", "share"),
    [(0.95, 0.05, 0.0), (1.2, 0.05, 0.0), (1.4, 0.05, 1.0), (1.4, 0.1, 0.0), (4.0, 0.1, 1.0)],
)
def test_without_noise_the_limit_decides(candidate: float, noise: float, share: float) -> None:
    often = {"luckiest_of": 1, "n_repeats": 5, "rng": np.random.default_rng(0)}
    hours = [Hour(np.ones((3, 2)), noise)]
    assert share_dropped([QUIET], hours, candidate, **often) == share


def test_each_race_allows_for_the_noise_of_its_own_hour() -> None:
    often = {"luckiest_of": 0, "n_repeats": 40, "rng": np.random.default_rng(0)}
    hours = [Hour(np.ones((3, 2)), 0.05), Hour(np.ones((1, 2)), 0.1)]
    assert share_dropped([QUIET], hours, 1.4, **often) == pytest.approx(0.75, abs=0.2)


def test_the_noise_is_that_of_a_round() -> None:
    rng = np.random.default_rng(0)
    rounds = rng.uniform(0.5, 2.0, (400, 1)) * np.exp(rng.normal(0.0, 0.1, (400, 4)))
    assert estimated_noise(rounds, rng) == pytest.approx(0.1, rel=0.3)


def test_a_lucky_incumbent_drops_what_is_better() -> None:
    often = {"luckiest_of": 8, "n_repeats": 40, "rng": np.random.default_rng(0)}
    honest = share_dropped([QUIET], [Hour(np.ones((1, 2)), 0.05)], 0.95, **often)
    lucky = share_dropped([QUIET], [Hour(np.array([[0.5, 1.0]]), 0.05)], 0.95, **often)
    assert (honest, lucky) == (0.0, pytest.approx(0.5, abs=0.3))


def test_published_runs_are_read() -> None:
    runs = recorded_runs(RUNS_FILE)
    assert runs
    assert all(len(kernels) >= 8 for kernels in runs.values())


def test_what_a_round_has_in_common_cancels() -> None:
    often = {"n_repeats": 40, "rng": np.random.default_rng(0)}
    hours = [Hour(np.array([[0.5, 0.5], [1.0, 1.0]]), 0.05)]
    assert share_dropped([QUIET], hours, 0.95, luckiest_of=0, **often) == 0.0
    assert share_dropped([QUIET], hours, 0.95, luckiest_of=1, **often) > 0.0
