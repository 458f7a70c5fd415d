from __future__ import annotations

import numpy as np

from benchmarks.micro.playoff_simulation import simulate


def test_more_noise_chooses_the_slower_one_more_often() -> None:
    rng = np.random.default_rng(0)
    rounds = rng.normal(0.0, 1.0, (200, 6))
    quiet, n_quiet = simulate(np.exp(0.005 * rounds), 1.03, 50, rng)
    loud, n_loud = simulate(np.exp(0.2 * rounds), 1.03, 50, rng)
    hopeless, _ = simulate(np.exp(0.2 * rounds), 3.0, 50, rng)
    assert quiet == hopeless == 0.0
    assert 0.1 < loud < 0.6
    assert n_quiet < n_loud <= 50.0


def test_speed_phases_of_the_machine_cancel() -> None:
    rng = np.random.default_rng(0)
    phases = np.repeat(rng.choice([1.0, 1.45], 200)[:, None], 4, axis=1)
    assert simulate(phases, 1.03, 50, rng)[0] == 0.0
