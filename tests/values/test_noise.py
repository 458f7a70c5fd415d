"""The estimate of the machine's noise."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_adaptive.values.noise import PRIOR_ERROR, MachineNoise


def test_without_pairs_the_prior_counts():
    noise = MachineNoise()
    assert noise.relative_error == pytest.approx(PRIOR_ERROR)
    assert noise.micro_batch_error == pytest.approx(0.1)


@pytest.mark.parametrize("error", [0.01, 0.03, 0.1])
def test_many_pairs_give_the_error_whatever_a_few_changes_of_speed_do(error):
    rng = np.random.default_rng(0)
    noise = MachineNoise()
    for index in range(300):
        first, second = np.exp(rng.normal(0.0, error, 2))
        noise.add_pair(first, second * (1.45 if index % 10 == 0 else 1.0))
    assert noise.relative_error == pytest.approx(error, rel=0.4)


def test_one_wild_pair_changes_nothing():
    noise = MachineNoise()
    noise.add_pair(1.0, 10.0)
    assert noise.relative_error == pytest.approx(PRIOR_ERROR)


def test_the_order_of_a_pair_does_not_matter():
    one, other = MachineNoise(), MachineNoise()
    for sec in (1.2, 1.3, 1.4, 1.5, 1.6, 1.7):
        one.add_pair(1.0, sec)
        other.add_pair(sec, 1.0)
    assert one.relative_error == pytest.approx(other.relative_error)
    assert one.relative_error > PRIOR_ERROR


def test_what_is_no_noise_does_not_become_it():
    noise = MachineNoise()
    for _ in range(50):
        noise.add_pair(1.0, 2.0)
    assert noise.relative_error > 0.4
    assert noise.quiet_error < 0.1
