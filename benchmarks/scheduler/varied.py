"""Networks of synthetic arms, drawn at random."""

from __future__ import annotations

import numpy as np

from tvm_adaptive.testing.synthetic import SyntheticArm


def varied_arms(
    n_arms: int, seed: int, *, spread: float = 0.3, failing: float = 0.05
) -> tuple[SyntheticArm, ...]:
    """Return arms as in a network: few expensive ones, many cheap ones, at different paces."""
    rng = np.random.default_rng(seed)
    arms = []
    for k in range(n_arms):
        # Latencies of a network's tasks span two to three decades, what tuning gains one.
        floor_ms = 10.0 ** rng.uniform(-2.0, 0.5)
        start_ms = floor_ms * 10.0 ** rng.uniform(0.1, 1.0)
        arms.append(
            SyntheticArm(
                name=f"arm{k}",
                start_ms=start_ms,
                floor_ms=floor_ms,
                tau_trials=float(rng.uniform(10.0, 80.0)),
                weight=float(rng.integers(1, 5)),
                flop=floor_ms * 10.0 ** rng.uniform(7.5, 8.5),
                sec_per_trial=float(rng.uniform(0.2, 0.6)),
                overhead_sec=float(rng.uniform(1.0, 3.0)),
                spread=spread,
                failing=failing,
            )
        )
    return tuple(arms)
