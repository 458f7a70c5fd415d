"""Times corrected by an anchor: a simulated machine that changes its speed, and lucky times."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tvm_adaptive.runner.duet import MAX_SHARE, Duet, Look

SLOW_PHASE = 1.45
PHASE_SEC = 60.0


def free_duet():
    duet = Duet(share=math.inf)
    duet.start_sec = -1.0
    return duet


class Machine:
    """Kernels' times under noise, on a machine that is slow every other minute."""

    def __init__(self, seed, *, drifts, noise=0.03, lucky=0.0):
        self.rng = np.random.default_rng(seed)
        self.phase_sec = self.rng.uniform(0, PHASE_SEC)
        self.drifts, self.noise, self.lucky = drifts, noise, lucky
        self.now_sec = 0.0

    def look(self, true_sec, takes_sec=0.03):
        self.now_sec += takes_sec
        is_slow = self.drifts and int((self.now_sec + self.phase_sec) // PHASE_SEC) % 2
        error = self.rng.normal(0, 0.5 * self.noise) + self.rng.exponential(0.6 * self.noise)
        if self.rng.random() < self.lucky:
            error -= self.rng.uniform(0.05, 0.35)
        return Look(self.now_sec, true_sec * math.exp(error) * (SLOW_PHASE if is_slow else 1.0))


def repeat(batch, machine):
    """Time the anchor, and beside it what may take its place."""
    if batch.anchor is not None:
        batch.note_repeat(machine.look(batch.anchor.kernel))
    if batch.next_anchor is not None:
        batch.note_next_anchor(machine.look(batch.next_anchor.kernel))


def timed_batch(duet, machine, trues):
    """Return the corrected times of a batch, with all the steps of a runner."""
    batch = duet.begin("task", machine.now_sec)
    repeat(batch, machine)
    for place, true_sec in enumerate(trues):
        batch.note(place, machine.look(true_sec), 0.02)
    while (place := batch.challenger()) is not None:
        batch.note(place, machine.look(trues[place]))
    repeat(batch, machine)
    place = batch.successor()
    batch.close(None if place is None else trues[place], 0.02)
    return [batch.results[place].sec for place in range(len(trues))]


def search(seed, *, is_duet, n_batches=40, batch=16, machine=Machine, **machine_options):
    """Search near the best record; return the true time of the best of the last play-off.

    As the runs do, the play-off takes the three that were recorded fastest.
    """
    machine, duet = machine(seed, **machine_options), free_duet()
    records = []
    rng = np.random.default_rng(seed + 1000)
    for _ in range(n_batches):
        machine.now_sec += 2.5  # search and builds
        best = min(records)[1] if records else 4.0
        steps = np.abs(rng.normal(0, 0.3, batch)) - 0.05 * rng.random(batch) * rng.integers(2)
        trues = list(np.maximum(best * np.exp(steps), 0.5))
        if is_duet:
            secs = timed_batch(duet, machine, trues)
        else:
            secs = [machine.look(true_sec).raw_sec for true_sec in trues]
        records += zip(secs, trues, strict=True)
    return min(true_sec for _, true_sec in sorted(records)[:3]), min(records), duet


def quality(*, is_duet, n_runs=24, **options):
    """Return the geometric mean of the true times of so many runs' winners."""
    runs = [search(seed, is_duet=is_duet, **options)[0] for seed in range(n_runs)]
    return float(np.exp(np.mean(np.log(runs))))


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_a_machine_that_drifts_costs_no_quality(noise):
    quiet = quality(is_duet=True, drifts=False, noise=noise)
    drifting = quality(is_duet=True, drifts=True, noise=noise)
    assert drifting < 1.03 * quiet
    # Without repeats it costs more, and on a quiet machine they do no harm.
    assert quality(is_duet=False, drifts=True, noise=noise) > 1.05 * quiet
    assert quiet < 1.03 * quality(is_duet=False, drifts=False, noise=noise)


def test_lucky_times_are_found_out():
    corrected, raw = (
        [search(seed, is_duet=is_duet, drifts=False, noise=0.01, lucky=0.03) for seed in range(15)]
        for is_duet in (True, False)
    )
    errors = [[sec / true_sec for _, (sec, true_sec), _ in runs] for runs in (corrected, raw)]
    assert np.median(errors[0]) > 0.97
    assert np.median(errors[1]) < 0.85


def test_the_noise_comes_from_the_repeats():
    noises = [
        search(0, is_duet=True, drifts=True, noise=noise)[2].noise.relative_error
        for noise in (0.01, 0.05)
    ]
    assert noises[0] < 0.025
    assert 0.03 < noises[1] < 0.07


def exact(duet, batch, *times_sec):
    """Note looks at whole seconds: the anchor's, the candidates', the anchor's."""
    before, *candidates, after = times_sec
    batch.note_repeat(Look(0.0, before))
    for place, sec in enumerate(candidates):
        batch.note(place, Look(1.0 + place, sec), 0.0)
    batch.note_repeat(Look(10.0, after))


def anchored(sec=1.0):
    duet = free_duet()
    first = duet.begin("task", 0.0)
    first.note(0, Look(0.0, sec), 0.0)
    first.close("anchor", 0.1)
    return duet


def test_a_change_of_speed_between_batches_cancels():
    duet = anchored()
    batch = duet.begin("task", 0.0)
    exact(duet, batch, 1.45, 1.45, 2.9, 1.45)
    batch.close()
    assert [result.sec for result in batch.results.values()] == pytest.approx([1.0, 2.0])
    assert [result.raw_sec for result in batch.results.values()] == [1.45, 2.9]


@pytest.mark.parametrize(("before", "after"), [(1.0, 1.45), (1.45, 1.0)])
def test_a_change_within_a_batch_makes_nothing_look_faster(before, after):
    duet = anchored()
    batch = duet.begin("task", 0.0)
    exact(duet, batch, before, 1.0, 1.45, after)
    assert batch.change == pytest.approx(math.log(1.45))
    batch.close()
    assert [result.sec for result in batch.results.values()] == pytest.approx([1.0, 1.45])
    assert all(result.relative_error > 0.2 for result in batch.results.values())


def test_a_record_is_timed_again_and_its_slower_time_counts():
    duet = anchored()
    batch = duet.begin("task", 0.0)
    batch.note_repeat(Look(0.0, 1.0))
    for place, sec in enumerate([0.5, 0.8, 1.2]):
        batch.note(place, Look(1.0, sec), 0.0)
    assert batch.challenger() == 0
    batch.note(0, Look(2.0, 1.1))  # it was luck
    assert batch.challenger() == 1
    batch.note(1, Look(3.0, 0.78))
    assert batch.challenger() is None
    assert batch.successor() == 1
    assert batch.close("faster", 0.1) == []
    assert [result.sec for result in batch.results.values()] == pytest.approx([1.1, 0.8, 1.2])
    anchor = duet.anchor("task")
    assert (anchor.kernel, anchor.sec, anchor.best_sec) == ("anchor", 1.0, 0.8)
    assert anchor.next.kernel == "faster"


def test_a_record_that_had_no_second_timing_does_not_keep_a_slow_anchor():
    duet = anchored()
    batch = duet.begin("task", 0.0)
    batch.note_repeat(Look(0.0, 1.0))
    batch.note(0, Look(1.0, 0.2), 0.0)  # the allowance is spent
    assert batch.successor() is None
    batch.close()
    batch = duet.begin("task", 0.0)
    batch.note_repeat(Look(0.0, 1.0))
    batch.note(0, Look(1.0, 0.25), 0.0)
    batch.note(1, Look(1.0, 0.97), 0.0)
    assert batch.challenger() == 0
    batch.note(0, Look(2.0, 0.25))
    assert batch.challenger() is None  # no other is next
    assert batch.successor() == 0


def followed(duet, *ratios, level=1.0):
    """Let a kernel that seemed to take half the time be next; return what is dropped at the end."""
    batch = duet.begin("task", 0.0)
    exact(duet, batch, level, 0.5 * level, level)
    batch.note(0, Look(1.0, 0.5 * level))
    batch.close("next_anchor", 0.2)
    dropped = []
    for first, second in zip(ratios[::2], ratios[1::2], strict=True):
        batch = duet.begin("task", 0.0)
        for ratio in (first, second):
            batch.note_repeat(Look(0.0, level))
            batch.note_next_anchor(Look(0.0, ratio * level))
        batch.note(0, Look(1.0, 0.3 * level), 0.0)
        batch.note(0, Look(1.0, 0.3 * level))
        assert batch.successor() is None  # one at a time
        dropped += batch.close()
    return dropped


@pytest.mark.parametrize("level", [1.0, 1.45])
def test_a_next_anchor_is_known_by_times_that_it_was_not_chosen_for(level):
    duet = anchored()
    assert followed(duet, 0.8, 0.81, level=level) == []
    assert duet.anchor("task").kernel == "anchor"
    # The pairs of both batches count, and one that was disturbed does not.
    batch = duet.begin("task", 0.0)
    for ratio in (0.79, 2.6):
        batch.note_repeat(Look(0.0, level))
        batch.note_next_anchor(Look(0.0, ratio * level))
    assert batch.close() == ["anchor"]
    anchor = duet.anchor("task")
    assert (anchor.kernel, anchor.cost_sec) == ("next_anchor", 0.2)
    assert anchor.sec == pytest.approx(0.805, abs=0.006)
    assert anchor.next is None
    # The time of luck does not keep others from being timed again.
    assert anchor.best_sec == anchor.sec


def test_a_next_anchor_that_was_lucky_is_dropped():
    duet = anchored()
    assert followed(duet, 1.02, 0.99, 0.5, 1.01) == ["next_anchor"]
    anchor = duet.anchor("task")
    assert (anchor.kernel, anchor.sec) == ("anchor", 1.0)
    assert anchor.best_sec == pytest.approx(1.0, rel=1e-3)
    assert anchor.next is None


def test_a_next_anchor_leaves_with_its_anchor():
    duet = anchored()
    followed(duet)
    assert sorted(duet.set_anchor("task", None)) == ["anchor", "next_anchor"]


def test_a_next_anchor_that_fails_costs_the_anchor_nothing():
    duet = anchored()
    followed(duet, 0.8, 0.81)
    batch = duet.begin("task", 0.0)
    batch.note_repeat(Look(0.0, 1.0))
    batch.drop_next_anchor()
    assert batch.close() == ["next_anchor"]
    assert duet.anchor("task").kernel == "anchor"
    assert duet.anchor("task").next is None


class NoisyHost(Machine):
    """Other tenants come for seconds, and every fifth timing is disturbed alone."""

    def __init__(self, seed, **options):
        super().__init__(seed, **options)
        self.load, self.until_sec = 1.0, 0.0

    def look(self, true_sec, takes_sec=0.03):
        look = super().look(true_sec, takes_sec)
        if self.now_sec > self.until_sec:
            self.load = math.exp(abs(self.rng.normal(0, 0.3)))
            self.until_sec = self.now_sec + self.rng.exponential(5.0)
        alone = self.rng.uniform(1.2, 2.6) if self.rng.random() < 0.2 else 1.0
        return Look(look.at_sec, look.raw_sec * self.load * alone)


def test_the_scale_stays_on_a_noisy_host():
    """Chosen by its own luck, each anchor would make it a little faster."""
    runs = [
        search(seed, is_duet=True, drifts=False, noise=0.06, machine=NoisyHost, n_batches=60)
        for seed in range(12)
    ]
    anchors = [duet.anchor("task") for _, _, duet in runs]
    # Above 1 it is the load of the first batch.
    assert min(anchor.sec / anchor.kernel for anchor in anchors) > 0.8


def test_a_difference_within_the_noise_keeps_the_anchor():
    duet = anchored()
    batch = duet.begin("task", 0.0)
    batch.note_repeat(Look(0.0, 1.0))
    batch.note(0, Look(1.0, 0.95), 0.0)
    batch.note(0, Look(1.0, 0.95))
    assert batch.successor() is None
    assert batch.close("slightly faster") == []
    anchor = duet.anchor("task")
    assert (anchor.kernel, anchor.sec, anchor.best_sec) == ("anchor", 1.0, 0.95)


def test_a_first_batch_is_on_the_scale_of_other_tasks():
    duet = anchored()
    duet.begin("task", 0.0).note_repeat(Look(0.0, 1.45))
    other = duet.begin("other", 10.0)
    other.note(0, Look(11.0, 2.9), 0.0)
    other.close("its anchor", 0.1)
    assert other.results[0].sec == pytest.approx(2.0)
    assert not duet.anchor("other").is_raw
    late = duet.begin("late", 100.0)  # the speed of then says nothing any more
    late.note(0, Look(101.0, 2.9), 0.0)
    late.close()
    assert late.results[0].sec == 2.9


@pytest.mark.parametrize("repeats", [(), (2.0,)])
def test_a_change_that_no_repeat_has_seen_makes_no_record(repeats):
    """The machine was slow for a batch; whether it still is, nobody has looked."""
    duet = anchored()
    exact(duet, loaded := duet.begin("task", 0.0), 2.0, 2.0, 2.0)
    loaded.close()
    batch = duet.begin("task", 20.0)
    for raw_sec in repeats:
        batch.note_repeat(Look(20.5, raw_sec))
    batch.note(0, Look(21.0, 1.0), 0.0)
    batch.note(1, Look(22.0, 0.4), 0.0)
    batch.close()
    # The second is faster than the anchor at any speed that the machine has shown.
    assert [batch.results[place].sec for place in (0, 1)] == pytest.approx([1.0, 0.4])
    assert duet.anchor("task").best_sec == pytest.approx(0.4)


def test_a_steady_machine_needs_no_repeats_for_records():
    duet = anchored()
    for factor in (1.03, 0.97, 1.02, 0.98, 1.0):
        exact(duet, batch := duet.begin("task", 0.0), factor, 2.0, factor)
        batch.close()
    batch = duet.begin("task", 100.0)
    batch.note(0, Look(101.0, 0.95), 0.0)
    batch.close()
    assert batch.results[0].sec == pytest.approx(0.95, rel=0.01)
    assert duet.anchor("task").best_sec == batch.results[0].sec


def test_repeats_after_all_candidates_alone_say_nothing_of_them():
    """The load began when the candidates were timed."""
    duet = anchored()
    batch = duet.begin("task", 0.0)
    for place, raw_sec in enumerate([1.0, 1.5]):
        batch.note(place, Look(1.0 + place, raw_sec), 0.0)
    for at_sec in (10.0, 11.0):
        batch.note_repeat(Look(at_sec, 2.0))
    batch.close()
    assert [batch.results[place].sec for place in (0, 1)] == pytest.approx([1.0, 1.5])


def test_a_task_keeps_its_scale_without_repeats():
    duet = anchored(2.0)
    exact(duet, faster := duet.begin("task", 0.0), 1.0, 1.0, 1.0)
    faster.close()
    assert faster.results[0].sec == pytest.approx(2.0)
    late = duet.begin("task", 200.0)
    late.note(0, Look(201.0, 1.0), 0.0)
    late.close()
    assert late.results[0].sec == pytest.approx(2.0)


def test_load_in_most_batches_is_no_noise():
    duet = anchored()
    for _ in range(6):
        exact(duet, batch := duet.begin("task", 0.0), 1.0, 1.0, 2.0)
        batch.close()
    assert duet.noise.relative_error > 0.3
    assert batch.change == pytest.approx(math.log(2.0))
    assert batch.results[0].sec == pytest.approx(1.0)


def test_a_second_timing_counts_by_the_faster_of_the_repeats_around_it():
    duet = anchored()
    batch = duet.begin("task", 0.0)
    batch.note_repeat(Look(0.0, 2.0))
    batch.note(0, Look(1.0, 0.9), 0.0)
    batch.note_repeat(Look(2.0, 2.0))
    batch.note(0, Look(2.5, 0.9))
    batch.note_repeat(Look(3.0, 1.0))
    assert batch.corrected_sec(0) == pytest.approx(0.9)


def test_an_anchor_that_is_lost_gives_the_scale_to_the_next():
    duet = anchored()
    batch = duet.begin("task", 0.0)
    batch.note_repeat(Look(0.0, 2.0))
    batch.note(0, Look(1.0, 2.2), 0.0)
    batch.is_anchor_lost = True
    assert batch.challenger() is None
    assert batch.successor() == 0
    batch.close("next", 0.1)
    anchor = duet.anchor("task")
    assert (anchor.kernel, anchor.sec) == ("next", pytest.approx(1.1))
    nothing = duet.begin("task", 0.0)
    nothing.is_anchor_lost = True
    assert nothing.close() == ["next"]
    assert duet.anchor("task") is None


def test_no_correction_makes_a_kernel_faster_than_its_operations():
    duet = anchored()
    exact(duet, batch := duet.begin("task", 0.0), 2.0, 1.0, 2.0)
    batch.close(floor_sec=0.8)
    assert batch.results[0].sec == 0.8


def test_a_batch_without_times_keeps_the_anchor():
    duet = anchored()
    batch = duet.begin("task", 0.0)
    assert (batch.challenger(), batch.successor(), batch.close()) == (None, None, [])
    assert duet.anchor("task").kernel == "anchor"


def test_repeats_take_three_percent_at_most():
    rng = np.random.default_rng(0)
    duet = Duet()
    now_sec, n_repeats = 5.0, 0
    duet.begin("task", now_sec)
    start_sec = now_sec
    for _ in range(1000):
        now_sec += rng.uniform(0.1, 1.0)
        if duet.allows(0.05, now_sec):
            duet.spent_sec += 0.05
            now_sec += 0.05
            n_repeats += 1
        assert duet.spent_sec <= MAX_SHARE * (now_sec - start_sec)
    assert n_repeats * 0.05 > 0.9 * MAX_SHARE * (now_sec - start_sec)


def adopted(level, duet=None, *, at_sec=0.0):
    """Let a kernel of an earlier attempt be the anchor, where the machine is so slow now."""
    duet = duet or free_duet()
    assert duet.adopt("task", "earlier", 1.0, 0.1, at_sec) == []
    batch = duet.begin("task", at_sec)
    batch.note_repeat(Look(at_sec, level))
    return duet, batch


@pytest.mark.parametrize("level", [0.5, 1.0, 2.0])
def test_a_resumed_run_keeps_the_scale_of_its_earlier_attempts(level):
    duet, batch = adopted(level)
    assert batch.slowness() == pytest.approx(level)  # before any candidate races
    for place, true_sec in enumerate([1.5, 0.8]):
        batch.note(place, Look(1.0 + place, true_sec * level), 0.0)
    assert batch.challenger() == 1  # a record by what was recorded
    batch.note(1, Look(4.0, 0.8 * level))
    batch.note_repeat(Look(5.0, level))
    batch.close("faster", 0.1)
    assert [batch.results[place].sec for place in (0, 1)] == pytest.approx([1.5, 0.8])
    anchor = duet.anchor("task")
    assert (anchor.kernel, anchor.sec, anchor.next.kernel) == ("earlier", 1.0, "faster")
    # Without a repeat, by what the last ones have shown.
    late = duet.begin("task", 200.0)
    late.note(0, Look(201.0, 0.7 * level), 0.0)
    late.close()
    assert late.results[0].sec == pytest.approx(0.7)


def test_tasks_on_an_earlier_scale_and_on_todays_share_changes_of_speed():
    duet, batch = adopted(2.0)
    batch.close()
    new = duet.begin("new", 1.0)  # at the speed of its first batch
    new.note(0, Look(1.0, 3.0), 0.0)
    new.close("its anchor", 0.1)
    assert new.results[0].sec == pytest.approx(3.0)
    duet.begin("task", 50.0).note_repeat(Look(50.0, 3.0))  # slower by a half since
    assert duet.slowness("new", 51.0) == pytest.approx(1.5)
    assert duet.slowness("task", 51.0) == pytest.approx(3.0)
    # A task that is resumed now has its own scale, too.
    duet.adopt("other", "its earlier", 1.0, 0.1, 52.0)
    duet.begin("other", 52.0).note_repeat(Look(52.0, 6.0))
    assert duet.slowness("other", 53.0) == pytest.approx(6.0)
    assert not duet.anchor("other").is_raw
    assert duet.slowness("task", 53.0) == pytest.approx(3.0)


def test_an_earlier_kernel_that_fails_lets_the_scale_begin_anew():
    duet = free_duet()
    duet.adopt("task", "earlier", 1.0, 0.1, 0.0)
    batch = duet.begin("task", 0.0)
    assert not duet.is_placed("task")
    batch.is_anchor_lost = True
    batch.note(0, Look(1.0, 3.0), 0.0)
    assert batch.close("first", 0.1) == ["earlier"]
    assert batch.results[0].sec == pytest.approx(3.0)
    assert duet.anchor("task").kernel == "first"
    assert duet.is_placed("task")
