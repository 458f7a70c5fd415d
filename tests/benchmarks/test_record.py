import pytest

from benchmarks.scheduler.record import machine_in_words, record_from_journal
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.journal import Journal


class Clock:
    """A journal whose events carry the times that the test gives."""

    def __init__(self, path, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.journal = Journal(path)

    def at(self, now, event, **fields):
        self.now = now
        self.journal.write(event, **fields)

    def round(self, now, task, n, *, search=(0.5, 0.25, 0.25)):
        sample, posterior, evolve = search
        self.at(
            now, "round", task=task, n_candidates=n, sample_sec=sample, posterior_sec=posterior,
            evolve_sec=evolve,
        )  # fmt: skip

    def measured(self, now, task, latencies, *, weight=1.0, flop=1e9):
        self.at(
            now, "measured", task=task, weight=weight, flop=flop, n_candidates=len(latencies),
            latencies_ms=latencies,
        )  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.jsonl"


@pytest.fixture
def clock(path, monkeypatch):
    return Clock(path, monkeypatch)


def header(clock):
    clock.at(
        0.0, "run", what="net", seed=3, tvm="0.27", target={"mcpu": "znver4", "num-cores": 2},
        config={"search": {"n_trials_per_round": 4}},
    )  # fmt: skip


def test_rounds_become_trials_with_their_seconds(path, clock):
    header(clock)
    # Results of a come in only after b's round, as in stock's warm-up.
    clock.round(11.0, "a", 4)
    clock.round(19.0, "b", 2)
    clock.measured(25.0, "a", [4.0, None, 3.0, 5.0], weight=2.0)
    clock.measured(26.0, "b", [1.0, 2.0], flop=0.0)
    clock.round(31.0, "a", 4, search=(1.0, 0.0, 1.0))
    clock.measured(36.0, "a", [2.0, 2.5, 2.5, None], weight=2.0)
    clock.at(39.0, "stage", stage="search", seconds=30.0)
    clock.at(99.0, "end")
    recording = record_from_journal(path)
    assert (recording.network, recording.seed, recording.batch, recording.tvm) == (
        "net", 3, 4, "0.27",
    )  # fmt: skip
    assert "znver4, 2 cores" in recording.machine
    a, b = recording.tasks
    assert (a.name, a.weight, a.flop, b.name, b.flop) == ("a", 2.0, 1e9, "b", 1.0)
    assert a.latencies_ms == pytest.approx(
        [4, float("nan"), 3, 5, 2, 2.5, 2.5, float("nan")], nan_ok=True
    )
    assert a.round_sizes.tolist() == [4, 4]
    assert a.overhead_sec == pytest.approx([1.0, 2.0])
    # From 10 to 18, and from 29 to 39, each without its search.
    assert a.trial_sec == pytest.approx([7.0 / 4] * 4 + [8.0 / 4] * 4)
    assert b.trial_sec == pytest.approx([10.0 / 2] * 2)
    assert recording.total_sec == pytest.approx(39.0 - 10.0)


def test_a_killed_run_is_good_up_to_its_last_results(path, clock):
    header(clock)
    clock.round(11.0, "a", 2)
    clock.measured(15.0, "a", [2.0, 1.0])
    clock.round(17.0, "a", 2)
    recording = record_from_journal(path, network="other", machine="mine")
    assert (recording.network, recording.machine) == ("other", "mine")
    assert recording.tasks[0].n_trials == 2
    assert recording.total_sec == pytest.approx(6.0)


def test_an_empty_round_is_left_out(path, clock):
    header(clock)
    clock.round(11.0, "a", 0)
    clock.measured(12.0, "a", [])
    clock.round(14.0, "a", 2)
    clock.measured(15.0, "a", [2.0, 1.0])
    assert record_from_journal(path).tasks[0].round_sizes.tolist() == [2]


def test_a_task_that_the_budget_did_not_reach_is_left_out(path, clock):
    header(clock)
    clock.round(14.0, "a", 2)
    clock.measured(15.0, "a", [2.0, 1.0])
    clock.measured(16.0, "b", [])
    assert [task.name for task in record_from_journal(path).tasks] == ["a"]


def test_what_is_missing_is_named(path, clock):
    header(clock)
    with pytest.raises(InvalidOptionError, match=r'0 rounds of search.*strategy="adaptive"'):
        record_from_journal(path)
    clock.round(11.0, "a", 2)
    clock.at(12.0, "measured", task="a", n_candidates=2)
    with pytest.raises(InvalidOptionError, match="before journals kept every trial's"):
        record_from_journal(path)


def test_of_a_round_that_the_budget_cut_what_was_tried_counts(path, clock):
    header(clock)
    clock.round(11.0, "a", 4)
    clock.measured(15.0, "a", [4.0, 3.0, 5.0])
    clock.at(16.0, "stage", stage="search", seconds=6.0)
    (a,) = record_from_journal(path).tasks
    assert a.latencies_ms == pytest.approx([4, 3, 5])
    assert a.round_sizes.tolist() == [3]
    assert a.trial_sec == pytest.approx([5 / 3] * 3)


def test_results_that_do_not_fit_are_refused(path, clock):
    header(clock)
    clock.round(11.0, "a", 1)
    clock.measured(12.0, "a", [1.0, 2.0])
    with pytest.raises(InvalidOptionError, match="a round of 1 candidates brought 2 results"):
        record_from_journal(path)


def test_a_machine_without_a_target_is_still_described():
    assert machine_in_words({})
