"""The local runner with an anchor: fake kernels on a machine whose speed a file tells."""

from __future__ import annotations

import errno
import itertools
import math
import os
import sys
from pathlib import Path

import cloudpickle
import pytest
from tvm.s_tir.meta_schedule.runner import Runner, RunnerInput

from tvm_adaptive.measure_callback.journal import Journal, NullJournal, read_journal
from tvm_adaptive.runner import repeats
from tvm_adaptive.runner.local import AdaptiveRunner
from tvm_adaptive.runner.stopping import make_rule
from tvm_adaptive.values.trial import Timing
from tvm_adaptive.values.trial_log import EarlierKernel, TrialLog

# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def fake_measure(artifact_path, device_type, args_info, options):
    """Time a file: it names the machine's folder, its seconds, and what comes the second time."""
    place, kernel = Path(artifact_path).read_text().splitlines()
    sec, _, again = kernel.partition(" ")
    folder = Path(place)
    is_again = options.rule.max_batches == 5
    with (folder / "log").open("a") as log:
        raced_sec = 0.0 if options.race is None else options.race.incumbent_sec
        log.write(f"{os.getpid()} {float(sec):g} {is_again} {options.is_kept} {raced_sec:g}\n")
    if "BROKEN" in os.environ:
        raise RuntimeError("an earlier launch failed")
    if is_again and again == "fault":
        os.environ["BROKEN"] = "yes"  # CUDA fails in the whole process from here on
        raise RuntimeError("illegal memory access")
    if is_again and again == "abort":
        os.abort()
    if is_again and again == "raise":
        raise RuntimeError("device lost")
    if is_again and again == "memory":
        raise MemoryError
    if is_again and again:
        sec = again
    raw_sec = float(sec) * float((folder / "speed").read_text())
    if options.is_kept and (folder / "misplaced").exists():
        raw_sec *= 1.65
    return Timing(raw_sec, 0.01 * raw_sec, 10, 10, "precise", 0.0)


class Bench:
    """A runner, its log, and the kernels that it is given."""

    def __init__(self, folder, **options):
        self.folder = folder
        self.log = TrialLog()
        self.log.batch_facts.task = "conv"
        self.journal = Journal(folder / "journal.jsonl")
        options = {"measure": fake_measure, "trial_log": self.log, **options}
        self.runner = AdaptiveRunner(journal=self.journal, **options)
        if self.runner._repeats is not None:
            self.runner._repeats.duet.share = math.inf
            self.runner._repeats.duet.start_sec = -1.0
        self.n_kernels = 0
        self.set_speed(1.0)

    def set_speed(self, factor):
        (self.folder / "speed").write_text(str(factor))

    def measured(self, *kernels, device_type="cpu"):
        """Return the seconds of a batch; MetaSchedule removes its artifacts afterwards."""
        inputs, paths = [], []
        for kernel in kernels:
            self.n_kernels += 1
            paths.append(self.folder / f"{self.n_kernels}.so")
            paths[-1].write_text(f"{self.folder}\n{kernel}")
            inputs.append(RunnerInput(str(paths[-1]), device_type, []))
        futures = Runner.run(self.runner, inputs)
        results = [future.result() for future in futures]
        assert all(future.done() for future in futures)
        for path in paths:
            path.unlink()
        return [
            result.error_msg if result.run_secs is None else float(result.run_secs[0])
            for result in results
        ]

    def steps(self):
        """Return the measurements so far: process, seconds, again, kept, raced against."""
        return [line.split() for line in (self.folder / "log").read_text().splitlines()]

    def events(self, kind):
        return [event for event in read_journal(self.journal.path) if event["event"] == kind]


@pytest.fixture
def make_bench(tmp_path):
    benches = []

    def make(**options):
        benches.append(Bench(tmp_path, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.runner.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_change_of_the_machine_cancels(make_bench, overlap):
    bench = make_bench(overlap=overlap)
    assert bench.measured(2.0, 1.0, 3.0) == [2.0, 1.0, 3.0]
    bench.log.batch_facts.incumbent_sec = 1.0
    bench.set_speed(1.5)
    assert bench.measured(2.0, 4.0) == pytest.approx([2.0, 4.0])
    *_, before, once_more, first, second, after = bench.steps()
    assert before[1:4] == after[1:4] == ["1", "True", "True"]
    assert once_more[1:4] == ["1", "True", "False"]  # with other arguments, as slow
    assert [first[1], second[1]] == ["2", "4"]
    assert first[4] == second[4] == "1.5"  # what the best takes at present
    assert len({step[0] for step in bench.steps()}) == 1  # in one worker
    event = bench.events("duet")[-1]
    assert (event["task"], event["anchor_sec"], event["repeats_sec"]) == ("conv", 1.0, [1.5, 1.5])
    assert event["raw_sec"] == pytest.approx([3.0, 6.0])
    assert event["corrected_sec"] == pytest.approx([2.0, 4.0])
    timings = {each["index"]: each["mean_sec"] for each in bench.events("timing")}
    assert [timings[index] for index in event["indices"]] == event["raw_sec"]


def test_an_anchor_that_alone_is_slow_corrects_nothing(make_bench):
    """Its arguments lie badly; the machine is as fast as before."""
    bench = make_bench()
    bench.measured(1.0)
    (bench.folder / "misplaced").touch()
    assert bench.measured(2.0, 1.3) == pytest.approx([2.0, 1.3])
    assert bench.events("duet")[-1]["repeats_sec"] == [1.0, 1.0]


def test_an_anchor_that_seems_slow_is_timed_again_though_the_allowance_is_spent(
    make_bench, monkeypatch
):
    bench = make_bench()
    bench.measured(1.0)
    (bench.folder / "misplaced").touch()
    answers = itertools.chain([True], itertools.repeat(False))
    monkeypatch.setattr(bench.runner._repeats.duet, "allows", lambda *_: next(answers))
    assert bench.measured(2.0, 1.3) == pytest.approx([2.0, 1.3])
    assert bench.events("duet")[-1]["repeats_sec"] == [1.0]


def test_a_lucky_candidate_is_timed_again(make_bench):
    bench = make_bench()
    bench.measured(1.0)
    assert bench.measured("0.5 1.2", 0.9) == pytest.approx([1.2, 0.9])
    # 0.9 is within the noise of 1.0, which stays the anchor; 0.3 is the next.
    assert bench.measured(0.3) == pytest.approx([0.3])
    assert bench.steps()[-1][1] == "1"
    for _ in range(2):
        bench.measured(0.8)
        assert [step[1:4] for step in bench.steps()[-2:]] == [
            ["1", "True", "True"],
            ["0.3", "True", "False"],  # with other arguments each time
        ]
    bench.measured(0.8)
    assert bench.steps()[-1][1] == "0.3"
    assert [each["next_anchor"] is None for each in bench.events("duet")] == [
        False,
        True,
        False,
        True,
        True,
        True,
    ]
    libraries = list(bench.runner._repeats._folder.path.glob("*.so"))
    assert len(libraries) == 1


def test_the_log_gets_corrected_errors(make_bench):
    bench = make_bench()
    bench.measured(1.0)
    bench.measured(2.0)
    bench.log.identify(str(bench.folder / "2.so"), 2)
    noise = bench.log.noise.relative_error
    assert bench.log.get(2).relative_error == pytest.approx(noise * math.sqrt(1.5))


@pytest.mark.parametrize("failure", ["abort", "raise"])
def test_an_anchor_that_fails_costs_no_candidate(make_bench, failure):
    bench = make_bench()
    bench.measured(f"1.0 {failure}")
    assert bench.measured(2.0, 3.0) == [2.0, 3.0]
    assert bench.measured(4.0) == [4.0]
    assert bench.steps()[-1][1:3] == ["2", "True"]  # the new anchor
    assert not bench.events("error")


@pytest.mark.parametrize("failure", ["abort", "raise", "nan"])
def test_a_record_that_cannot_be_timed_again_is_none(make_bench, failure):
    bench = make_bench()
    bench.measured(1.0)
    refuted, other = bench.measured(f"0.1 {failure}", 2.0)
    assert refuted.startswith("Error: it failed when it was timed again")
    assert other == pytest.approx(2.0)
    assert bench.runner._repeats.duet.anchor("conv").best_sec == 1.0
    bench.measured(3.0)
    assert bench.steps()[-1][1:3] == ["1", "True"]
    # A worker that has ended makes no further step.
    n_repeats = 1 if failure == "abort" else 2
    assert bench.events("duet")[1]["repeats_sec"] == n_repeats * [1.0]
    assert not bench.events("error")


@pytest.mark.parametrize("cause", ["machine", "clock"])
def test_a_repeat_that_something_else_ended_speaks_against_no_record(make_bench, tmp_path, cause):
    log = tmp_path / "log"

    def time_left() -> float:
        is_over = cause == "clock" and log.exists() and len(bench.steps()) == 4
        return 0.0 if is_over else math.inf

    bench = make_bench(time_left=time_left)
    bench.measured(1.0)
    assert bench.measured("0.1 memory", 2.0) == pytest.approx([0.1, 2.0])
    again = [step[1:] for step in bench.steps()[4:]]
    assert again == ([["0.1", "True", "False", "0"]] if cause == "machine" else [])
    assert not bench.events("error")


def resumed(bench, kernel, sec):
    """Let the next batch be the first of its task after others of an earlier attempt."""
    folder = bench.folder / "built"
    folder.mkdir()
    (folder / "earlier.so").write_text(f"{bench.folder}\n{kernel}")
    bench.log.batch_facts.earlier = EarlierKernel(str(folder / "earlier.so"), (), sec)
    bench.log.batch_facts.incumbent_sec = sec


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_a_resumed_run_corrects_to_what_it_has_recorded(make_bench, speed):
    bench = make_bench()
    bench.runner._repeats.duet.share = 0.0  # at first nothing is saved for repeats
    bench.set_speed(speed)
    resumed(bench, 1.0, 1.0)
    assert bench.measured(3.0, 0.9) == pytest.approx([3.0, 0.9])
    assert bench.steps()[0][1:4] == ["1", "True", "True"]
    # What the recorded best takes at present.
    assert [step[4] for step in bench.steps() if step[2] == "False"] == 2 * [f"{speed:g}"]
    assert bench.runner._repeats.duet.spent_sec == 0.0
    event = bench.events("duet")[0]
    assert (event["anchor_sec"], event["repeats_sec"]) == (1.0, [speed])
    # Later batches are on that scale, whether the anchor is timed again or not.
    assert bench.measured(2.0) == pytest.approx([2.0])
    bench.runner._repeats.duet.share = math.inf
    bench.set_speed(1.5 * speed)
    assert bench.measured(2.0) == pytest.approx([2.0])
    assert not bench.events("error")


def test_a_badly_placed_earlier_kernel_corrects_nothing(make_bench):
    bench = make_bench()
    (bench.folder / "misplaced").touch()
    resumed(bench, 1.0, 1.0)
    assert bench.measured(2.0) == pytest.approx([2.0])


def test_a_fault_of_one_record_on_a_gpu_refutes_no_other(make_bench):
    bench = make_bench()
    bench.measured(1.0, device_type="cuda")
    refuted, good, slow = bench.measured("0.1 fault", 0.2, 2.0, device_type="cuda")
    assert refuted.startswith("Error: it failed when it was timed again")
    assert (good, slow) == pytest.approx((0.2, 2.0))
    assert bench.runner._repeats.duet.anchor("conv").best_sec == 0.2
    assert bench.measured(3.0, device_type="cuda") == pytest.approx([3.0])


@pytest.mark.parametrize("failure", ["abort", "raise", "nan", "gone"])
def test_an_earlier_kernel_that_fails_costs_no_candidate(make_bench, failure):
    bench = make_bench()
    bench.set_speed(2.0)
    resumed(bench, f"1.0 {failure}", 1.0)
    if failure == "gone":
        Path(bench.log.batch_facts.earlier.artifact).unlink()
    assert bench.measured(1.0, 1.5) == pytest.approx([2.0, 3.0])  # on today's scale
    assert bench.measured(2.0) == pytest.approx([4.0])
    n_tried = sum(event["anchor_sec"] == 1.0 for event in bench.events("duet"))
    assert n_tried == (0 if failure == "gone" else 1)
    assert not bench.events("error")


def test_an_earlier_kernel_that_had_no_time_is_timed_after_the_batch(make_bench):
    lefts_sec = iter([0.0])
    bench = make_bench(time_left=lambda: next(lefts_sec, math.inf))
    bench.set_speed(2.0)
    resumed(bench, 1.0, 1.0)
    assert bench.measured(3.0) == pytest.approx([3.0])
    assert bench.steps()[0][1] == "3"


def test_each_task_has_its_anchor(make_bench):
    bench = make_bench()
    bench.measured(1.0)
    bench.log.batch_facts.task = "dense"
    bench.measured(5.0)
    bench.measured(6.0)
    assert bench.steps()[-1][1] == "5"
    bench.log.batch_facts.task = "conv"
    bench.measured(2.0)
    assert bench.steps()[-1][1] == "1"


def test_repeats_that_are_too_expensive_are_left_out(make_bench):
    bench = make_bench()
    bench.measured(1.0)
    bench.runner._repeats.duet.share = 0.0
    bench.set_speed(1.5)
    assert bench.measured(2.0) == [3.0]
    assert not any(step[2] == "True" for step in bench.steps())


@pytest.mark.parametrize("options", [{"duet": False}, {"rule": "paper"}, {"devices": (0, 1)}])
def test_it_can_be_switched_off(make_bench, options):
    bench = make_bench(**options)
    bench.measured(1.0)
    bench.set_speed(1.5)
    assert bench.measured(2.0) == [3.0]
    assert not bench.events("duet")


def test_a_closed_runner_starts_anew(make_bench):
    bench = make_bench()
    bench.measured(1.0)
    folder = bench.runner._repeats._folder.path
    bench.runner.close()
    assert not folder.exists()
    assert bench.measured(2.0) == [2.0]
    assert make_rule("precision").max_batches != 5  # what marks a repeat above


def test_what_was_linked_beside_an_artifact_is_removed_with_it(tmp_path: Path) -> None:
    artifact = tmp_path / "candidate" / "candidate.tar"
    artifact.parent.mkdir()
    artifact.touch()
    anchors = repeats.Repeats(TrialLog(), NullJournal())
    kept = anchors.keep((str(artifact), "cpu", []))
    assert kept is not None
    copied = Path(kept[0])
    Path(f"{copied}.so").touch()  # as TVM does
    anchors.drop([kept])
    assert not list(copied.parent.glob("*.tar*"))
    anchors.close()


def test_an_artifact_that_cannot_be_copied_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = tmp_path / "candidate" / "kernel.so"
    artifact.parent.mkdir()
    artifact.write_bytes(bytes(100))
    kept = repeats.Repeats(TrialLog(), NullJournal())

    def copy_half(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:50])
        raise OSError(errno.ENOSPC, "no space is left")

    monkeypatch.setattr(repeats.shutil, "copyfile", copy_half)
    assert kept.keep((str(artifact), "cpu", [])) is None
    (folder,) = [path for path in tmp_path.iterdir() if path != artifact.parent]
    assert [path.name for path in folder.iterdir()] == ["owner.json"]
    kept.close()
