"""Does a 90 % interval for the best after the next slot contain it 90 times in 100?

On real tunings, as the default policy forecasts them while it replays them; on trials that are
exchangeable, with tails light, heavy and bounded; on simulated searches that learn; and on
recorded latencies of real candidates, in random orders.
"""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.scheduler.recordings import load_recording
from tvm_adaptive.task_scheduler.arms import best_so_far
from tvm_adaptive.task_scheduler.forecast.belief import forecast, forecast_history
from tvm_adaptive.task_scheduler.policy import DEFAULT, DynaTunePolicy
from tvm_adaptive.testing.replay import draw, replay

RECORDINGS = sorted((Path(__file__).parents[3] / "benchmarks" / "data").glob("*.npz"))
POOLS = Path(__file__).parents[3] / "benchmarks" / "micro" / "pools"
N_TRIALS = 480
N_SERIES = 60
SLOTS = [(16, 16), (32, 64), (64, 16), (96, 32), (192, 16), (384, 64)]


def exchangeable(draw):
    def series(rng):
        throughput = np.asarray(draw(rng), dtype=float)
        throughput[rng.random(len(throughput)) < 0.1] = 0.0
        return throughput

    return series


def learning(rng):
    """Batches of children of the best so far, below a limit, and some drawn at random."""
    limit, scatter = rng.uniform(-2.0, 0.5), rng.uniform(0.3, 1.2)
    step, drift = rng.uniform(0.1, 0.5), rng.uniform(0.0, 0.25)
    log_throughput = -rng.gamma(3.0, scatter, 16)
    while len(log_throughput) < N_TRIALS:
        parents = rng.choice(np.sort(log_throughput)[-12:], 16)
        children = parents + rng.normal(-drift, step, 16)
        above = np.maximum(children - limit, 0.0)
        children = np.where(above > 0, limit - 0.3 * above, children)
        random = -rng.gamma(3.0, scatter, 16)
        batch = np.where(rng.random(16) < 0.1, random, children)
        log_throughput = np.append(log_throughput, batch)
    return np.exp(log_throughput + rng.normal(0.0, 0.01, len(log_throughput)))


def pool(name):
    def series(rng):
        seconds = np.load(POOLS / f"{name}.npz")["seconds"]
        throughput = np.where(np.isfinite(seconds), 1.0 / seconds, 0.0)
        return rng.permutation(throughput)[:N_TRIALS]

    return series


SOURCES = {
    "bounded": exchangeable(lambda rng: rng.beta(1.5, 4.0, N_TRIALS)),
    "light": exchangeable(lambda rng: np.maximum(1 - rng.weibull(1.5, N_TRIALS) / 6, 0)),
    "log-normal": exchangeable(lambda rng: np.exp(rng.normal(0.0, 1.0, N_TRIALS))),
    "heavy": exchangeable(lambda rng: 1 / np.maximum(rng.gamma(2.0, 1.0, N_TRIALS), 0.05)),
    "learning": learning,
    "C2D": pool("C2D"),
    "GMM": pool("GMM"),
    "SFM": pool("SFM"),
}


def outcomes(source, method, n_series=N_SERIES):
    """Yield a forecast and what came of it, several for each series of trials."""
    rng = np.random.default_rng(11)
    for _ in range(n_series):
        best = np.maximum.accumulate(SOURCES[source](rng))
        for n, m in SLOTS:
            if best[n - 1] > 0:
                yield forecast(best[:n], m, method=method, rng=rng), best[n + m - 1]


def coverage(pairs):
    """Return the share of outcomes between the 5 % and the 95 % quantile."""
    inside = []
    for belief, outcome in pairs:
        low, high = belief.quantile([0.05, 0.95])
        inside.append(low * (1 - 1e-9) <= outcome <= high * (1 + 1e-9))
    return float(np.mean(inside))


class Observed(DynaTunePolicy):
    """The default policy; keeps its last forecast of each arm after each number of trials."""

    def __init__(self):
        super().__init__("default", self.forecast)
        self.name = ""
        self.forecasts = {}

    def _outlook(self, arm, peer_rate, rng):
        self.name = arm.name
        return super()._outlook(arm, peer_rate, rng)

    def forecast(self, history, horizon, rng):
        belief = forecast_history(
            history, horizon, rng, method=DEFAULT.method, family=DEFAULT.family
        )
        self.forecasts[self.name, len(history), horizon] = belief
        return belief


def real_slots(path, seed=11):
    """Yield the default policy's forecasts on a recording, and what came of each arm's slot.

    What an arm is expected to reach is what others had reached by then, as in a run.
    """
    recording, policy = load_recording(path), Observed()
    replay(recording, policy, seed, batch=DEFAULT.slot_trials)
    best_ms = {task.name: best_so_far(task.latencies_ms) for task in draw(recording, seed).tasks}
    for (name, n, horizon), belief in policy.forecasts.items():
        if n + horizon <= len(best_ms[name]):
            yield belief, best_ms[name][n - 1] / best_ms[name][n + horizon - 1]


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_intervals_for_real_slots_cover_what_they_say(path):
    assert 0.80 <= coverage(real_slots(path)) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_the_default_covers_what_it_says(source):
    # Most of these are no searches, so that one may be a little too careful.
    assert 0.80 <= coverage(outcomes(source, "quadrature")) <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_the_records_cover_what_they_say_or_more(source):
    # Without a curve, jumps as large as early ones are expected for ever.
    assert coverage(outcomes(source, "records")) >= 0.80


@pytest.mark.slow
def test_the_published_belief_is_far_too_certain():
    pairs = [pair for source in ("C2D", "learning") for pair in outcomes(source, "emcee", 3)]
    assert coverage(pairs) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("method", ["quadrature", "records"])
@pytest.mark.parametrize("source", SOURCES)
def test_the_chance_of_an_improvement_is_what_it_says(source, method):
    pairs = list(outcomes(source, method))
    said = np.mean([(belief.samples > belief.incumbent).mean() for belief, _ in pairs])
    came = np.mean([outcome > belief.incumbent for belief, outcome in pairs])
    # 360 outcomes, but only 60 independent series: a standard error of 0.03 or so.
    assert said == pytest.approx(came, abs=0.12)
