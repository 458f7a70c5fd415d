import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.cost_model.acquisition import log_expected_improvement
from tvm_adaptive.cost_model.dataset import Dataset
from tvm_adaptive.cost_model.forest import STDS
from tvm_adaptive.cost_model.surrogate import Surrogate, SurrogateOptions, rank_correlation
from tvm_adaptive.cost_model.targets import TARGETS
from tvm_adaptive.errors import InvalidOptionError


def candidates(n=60, seed=0, scale=1e-3):
    rng = np.random.default_rng(seed)
    rows = rng.uniform(size=(n, 6)).astype(np.float32)
    return rows, scale * np.exp(2 * rows[:, 0] + rng.normal(0, 0.02, n))


def trained(n=60, **options):
    surrogate = Surrogate(SurrogateOptions(**{"n_trees": 30, **options}), seed=0)
    surrogate.dataset.add("a", *candidates(n))
    assert surrogate.refit_if_due() is not None
    return surrogate


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_trees": 1}, "n_trees must be an integer of at least 2 but got 1"),
        ({"n_trees": 2.5}, "n_trees must be an integer of at least 2 but got 2.5"),
        ({"n_jobs": 0}, "n_jobs must be an integer of at least 1 but got 0"),
        ({"max_features": 0.0}, r"max_features must be in \(0, 1\] but got 0.0"),
        ({"max_features": 0}, "max_features must be an integer of at least 1 but got 0"),
        ({"max_features": math.nan}, r"max_features must be in \(0, 1\] but got nan"),
        (
            {"std": "tree"},
            "std must be one of shrunk, between-tree, total, jackknife but got 'tree'",
        ),
        ({"target": "time"}, "target must be one of root, log, throughput but got 'time'"),
        ({"acquisition": "ucb"}, "acquisition must be one of ei, mean but got 'ucb'"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(InvalidOptionError, match=message):
        SurrogateOptions(**options)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("acquisition", ["ei", "mean"])
def test_fast_candidates_score_higher(target, std, acquisition):
    # The jackknife needs hundreds of trees: with 30, most of its variances are clipped to 0.
    n_trees = 400 if std == "jackknife" else 30
    surrogate = trained(target=target, std=std, acquisition=acquisition, n_trees=n_trees)
    rows, seconds = candidates(40, seed=1)
    scores = surrogate.scores("a", rows)
    assert (scores > 0).all()
    assert np.isfinite(scores).all()
    if (std, acquisition) == ("jackknife", "ei"):
        # It states how sure the mean is, not where candidates scatter: far below the
        # incumbent EI ranks by that. The candidates on top are the fast ones all the same.
        assert np.median(seconds[np.argsort(-scores)[:5]]) < np.quantile(seconds, 0.25)
    else:
        assert rank_correlation(scores, -seconds) > 0.8


@pytest.mark.parametrize("acquisition", ["ei", "mean"])
def test_scores_do_not_depend_on_the_batch(acquisition):
    surrogate = trained(acquisition=acquisition)
    rows, _ = candidates(40, seed=1)
    whole = surrogate.scores("a", rows)
    np.testing.assert_array_equal(whole[:7], surrogate.scores("a", rows[:7]))


@pytest.mark.parametrize("target", TARGETS)
def test_the_posterior_is_in_units_of_the_best(target):
    surrogate = trained(target=target)
    rows, seconds = candidates(40, seed=1)
    truth = surrogate.dataset.best_sec("a") / seconds
    posterior = surrogate.posterior("a", rows)
    assert np.mean(np.abs(posterior.mean - truth)) < 0.1
    assert (posterior.std >= 0).all()


@pytest.mark.parametrize("target", TARGETS)
def test_a_better_incumbent_rescales_the_posterior_before_the_refit(target):
    surrogate = trained(target=target)
    rows, _ = candidates(40, seed=1)
    before, scores = surrogate.posterior("a", rows), surrogate.scores("a", rows)
    surrogate.dataset.add("a", rows[:1], np.array([surrogate.dataset.best_sec("a") / 2]))
    assert surrogate.refit_if_due() is None
    after = surrogate.posterior("a", rows)
    np.testing.assert_allclose(after.mean, before.mean / 2)
    np.testing.assert_allclose(after.std, before.std / 2)
    assert (surrogate.scores("a", rows) < scores).all()


@pytest.mark.parametrize("std", ["total", "jackknife"])
def test_every_kind_of_std_reaches_the_posterior(std):
    rows, _ = candidates(40, seed=1)
    other, between = trained(std=std).posterior("a", rows), trained().posterior("a", rows)
    assert (other.std != between.std).any()
    assert (other.std >= 0).all()


def test_nothing_to_say():
    surrogate = Surrogate(SurrogateOptions(n_trees=5), seed=0)
    rows, seconds = candidates(10)
    assert surrogate.refit_if_due() is None
    assert surrogate.scores("a", rows) is None
    assert surrogate.posterior("a", rows) is None
    assert surrogate.check("a", rows, seconds) is None
    surrogate.dataset.add("a", rows, np.full(10, math.nan))
    assert surrogate.refit_if_due() is None
    assert surrogate.scores("a", rows) is None


def test_a_task_never_seen_is_ranked_by_what_the_others_taught():
    surrogate = trained()
    rows, seconds = candidates(40, seed=1, scale=10.0)
    assert rank_correlation(surrogate.scores("b", rows), -seconds) > 0.8
    assert surrogate.posterior("b", rows) is None


def test_tasks_of_other_magnitude_share_one_forest():
    surrogate = trained()
    surrogate.dataset.add("b", *candidates(60, seed=2, scale=5.0))
    report = surrogate.refit_if_due()
    assert (report.n_samples, report.n_tasks, report.n_failures) == (120, 2, 0)
    rows, seconds = candidates(40, seed=1)
    for key in ("a", "b"):
        assert rank_correlation(surrogate.scores(key, rows), -seconds) > 0.8


def test_refits_come_with_growth():
    surrogate = trained(60)
    rows, seconds = candidates(3, seed=5)
    surrogate.dataset.add("a", rows[:2], seconds[:2])
    assert surrogate.refit_if_due() is None
    surrogate.dataset.add("a", rows[2:], seconds[2:])
    assert surrogate.refit_if_due().n_samples == 63
    assert surrogate.refit_if_due() is None


def test_a_full_dataset_does_not_delay_refits():
    surrogate = Surrogate(SurrogateOptions(n_trees=8), seed=0)
    surrogate.dataset.capacity = 200
    for seed in range(20):
        surrogate.add("a", *candidates(100, seed=seed))
        surrogate.refit_if_due()
    surrogate.add("a", *candidates(16, seed=99))
    assert surrogate.refit_if_due() is not None


def test_samples_that_were_loaded_delay_no_refit():
    loaded = Dataset()
    loaded.add("a", *candidates(400))
    loaded.add("elsewhere:b", *candidates(100, seed=1))
    surrogate = Surrogate(SurrogateOptions(n_trees=8), seed=0)
    surrogate.replace_dataset(loaded)
    assert 400 < surrogate.refit_if_due().n_samples < 500  # those of another machine fade
    for seed in range(3):
        surrogate.add("a", *candidates(8, seed=seed + 2))
        assert surrogate.refit_if_due() is not None


def test_ceilings_of_this_machine_do_not_depend_on_another_ones():
    """Tasks of the same work per second, and one that is far from it."""
    ceilings = []
    for speed in (1.0, 0.1):
        elsewhere = Dataset()
        for place in range(9):
            rows, seconds = candidates(30, seed=place)
            rows = np.pad(rows, ((0, 0), (0, 60)))
            elsewhere.add(str(place), rows * (place + 1), speed * seconds * (place + 1))
        surrogate = Surrogate(SurrogateOptions(n_trees=8), seed=0)
        surrogate.preload(elsewhere, fading=True)
        rows, seconds = candidates(4, seed=20)
        surrogate.add("mine", np.pad(rows, ((0, 0), (0, 60))), 3 * seconds)
        surrogate.refit_if_due()
        ceilings.append(surrogate._ceilings["mine"])
    assert ceilings[0] == pytest.approx(ceilings[1], rel=1e-9)


def test_of_equal_means_the_cheaper_scores_higher():
    surrogate = trained(acquisition="mean")
    rows, _ = candidates(1, seed=3)
    cheap, dear = surrogate.scores("a", np.repeat(rows, 2, axis=0), np.array([0.2, 15.0]))
    assert cheap > dear


@pytest.mark.parametrize("acquisition", ["ei", "mean"])
def test_candidates_that_look_like_failures_lose(acquisition):
    rows, seconds = candidates(80)
    fails = rows[:, 1] > 0.5
    options = SurrogateOptions(n_trees=30, acquisition=acquisition)
    surrogate = Surrogate(options, seed=0)
    surrogate.dataset.add("a", rows, np.where(fails, math.nan, seconds))
    report = surrogate.refit_if_due()
    assert report.validity
    assert report.n_failures == fails.sum()
    good = rows[~fails][np.argsort(seconds[~fails])[:5]]
    bad = good.copy()
    bad[:, 1] = 0.9
    assert (surrogate.scores("a", bad) < surrogate.scores("a", good)).all()


def test_few_failures_make_no_model():
    rows, seconds = candidates(20)
    seconds[:3] = math.nan
    surrogate = Surrogate(SurrogateOptions(n_trees=5), seed=0)
    surrogate.dataset.add("a", rows, seconds)
    assert not surrogate.refit_if_due().validity


def test_judging_a_batch():
    surrogate = trained()
    rows, seconds = candidates(40, seed=1)
    seconds[0] = math.nan
    quality = surrogate.check("a", rows, seconds)
    assert quality.n == 39
    assert quality.spearman > 0.8
    assert 0 < quality.z_rms < 5
    assert 0.5 < quality.coverage <= 1
    far = surrogate.check("a", rows, 100 * seconds)
    assert far.coverage == 0
    assert far.z_rms > 3
    unknown = surrogate.check("b", rows, seconds)
    assert math.isnan(unknown.z_rms)
    assert math.isnan(unknown.coverage)
    assert surrogate.check("a", rows[:2], seconds[:2]) is None


def test_the_same_data_and_seed_give_the_same_scores():
    rows, _ = candidates(20, seed=1)
    first, again = trained(), trained()
    np.testing.assert_array_equal(first.scores("a", rows), again.scores("a", rows))
    first.replace_dataset(again.dataset)
    assert first.scores("a", rows) is None
    first.refit_if_due()
    np.testing.assert_array_equal(first.scores("a", rows), again.scores("a", rows))
    first.replace_dataset(Dataset())
    assert first.refit_if_due() is None


@given(seed=st.integers(0, 50), n=st.integers(1, 12), share=st.floats(0, 1))
def test_no_data_make_bad_scores(seed, n, share):
    rng = np.random.default_rng(seed)
    rows, seconds = candidates(n, seed)
    seconds[rng.uniform(size=n) < share] = math.nan
    surrogate = Surrogate(SurrogateOptions(n_trees=3, n_jobs=1), seed=0)
    surrogate.dataset.add("a", rows, seconds)
    surrogate.refit_if_due()
    scores = surrogate.scores("a", rows)
    assert (scores is None) == np.isnan(seconds).all()
    if scores is not None:
        assert (scores > 0).all()
        assert np.isfinite(scores).all()
        posterior = surrogate.posterior("a", rows)
        assert np.isfinite(posterior.mean).all()
        assert np.isfinite(posterior.std).all()


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([1, 2, 3], [10, 20, 21], 1.0), ([1, 2, 3], [3, 2, 1], -1.0), ([1, 2, 2], [1, 2, 2], 1.0)],
)
def test_rank_correlation(a, b, expected):
    assert rank_correlation(np.array(a, float), np.array(b, float)) == pytest.approx(expected)


def test_rank_correlation_of_a_constant():
    assert math.isnan(rank_correlation(np.ones(3), np.arange(3.0)))


def test_of_equals_the_cheaper_scores_higher():
    surrogate = trained()
    rows, _ = candidates(30, seed=3)
    plain = surrogate.scores("a", rows)
    same = surrogate.scores("a", rows, np.full(30, 0.7))
    assert np.argsort(same).tolist() == np.argsort(plain).tolist()
    cost_sec = np.where(np.arange(30) % 2 == 0, 0.3, 3.0)
    per_second = surrogate.scores("a", rows, cost_sec)
    twice = surrogate.scores("a", np.repeat(rows, 2, axis=0), np.tile([0.3, 3.0], 30))
    assert (twice[0::2] > twice[1::2]).all()
    assert np.isfinite(per_second).all()
    assert (per_second > 0).all()


def test_a_great_improvement_is_worth_a_dear_build():
    surrogate = trained()
    rows, seconds = candidates(200, seed=3)
    order = np.argsort(seconds)
    pair = rows[[order[0], order[-1]]]
    fast, slow = surrogate.scores("a", pair, np.array([3.0, 0.3]))
    assert fast > slow


@pytest.mark.parametrize("n_own", [32, 200])
def test_samples_of_another_machine_fade(n_own):
    """There, what is slow here is fast."""
    rows, seconds = candidates(200, seed=2)
    elsewhere = Dataset()
    elsewhere.add("a", rows, 1e-6 / seconds)
    unseen, truth = candidates(100, seed=3)
    agreements = []
    for fading in (False, True):
        surrogate = Surrogate(SurrogateOptions(n_trees=30, acquisition="mean"), seed=0)
        surrogate.preload(elsewhere, fading=fading)
        surrogate.add("a", *candidates(n_own))
        surrogate.refit_if_due()
        agreements.append(rank_correlation(surrogate.scores("a", unseen), -truth))
    assert agreements[1] > agreements[0]


def test_samples_of_another_machine_count_in_full_at_first():
    elsewhere = Dataset()
    elsewhere.add("b", *candidates(50, seed=2))
    scores = []
    for fading in (False, True):
        surrogate = Surrogate(SurrogateOptions(), seed=0)
        surrogate.preload(elsewhere, fading=fading)
        surrogate.refit_if_due()
        scores.append(surrogate.scores("a", candidates(20, seed=3)[0]))
    np.testing.assert_array_equal(*scores)


def test_expected_improvement_is_not_paid_for_noise():
    """Candidates are alike in truth, and timed so roughly that they seem not to be."""
    rng = np.random.default_rng(0)
    rows = rng.uniform(size=(200, 6)).astype(np.float32)
    noise = rng.normal(0.0, 0.2, 200)
    spreads = []

    def acquisition(mean, std, best):
        spreads.append(np.median(std))
        return log_expected_improvement(mean, std, best)

    for error in (0.0, 0.2):
        surrogate = Surrogate(SurrogateOptions(acquisition=acquisition), seed=0)
        surrogate.add("a", rows, 1e-3 * np.exp(noise), np.full(200, error))
        surrogate.refit_if_due()
        surrogate.scores("a", rng.uniform(size=(50, 6)).astype(np.float32))
    believed, known = spreads
    assert known < 0.5 * believed
    # The incumbent is what the luckiest timing is worth: not 0.5 above the others.
    assert surrogate._luck["a"] > 0.2


def test_a_timing_without_error_is_no_luck():
    rows, seconds = candidates(60)
    surrogate = Surrogate(SurrogateOptions(), seed=0)
    surrogate.add("a", rows, seconds, np.zeros(60))
    surrogate.refit_if_due()
    assert abs(surrogate._luck["a"]) < 0.05


def test_a_rough_timing_does_not_make_a_star():
    """A slow candidate was once timed ten times too fast, which its error says."""
    rows, seconds = candidates(60)
    slow = int(np.argmax(seconds))
    timed, errors = seconds.copy(), np.full(60, 0.005)
    timed[slow] *= 0.1
    errors[slow] = 2.0
    surrogate = trained(acquisition="mean")
    surrogate.replace_dataset(Dataset())
    surrogate.add("a", rows, timed, errors)
    surrogate.refit_if_due()
    scores = surrogate.scores("a", rows)
    assert (scores > scores[slow]).mean() > 0.5
