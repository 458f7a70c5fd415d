"""The play-off of a task: its best records are checked, timed side by side and ranked.

A record is checked by running it on the same random values as the untuned module. One
that computes something else, crashes, hangs or cannot be checked never wins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    Builder,
    Database,
    RPCConfig,
    Target,
    TuningRecord,
    argument_bytes,
    copy_record,
    json_database,
)
from tvm_adaptive.errors import MachineError, NoDeviceError, OutOfTimeError, summary_line
from tvm_adaptive.measure_callback.journal import JournalWriter, NullJournal
from tvm_adaptive.models.prefetch import hinted
from tvm_adaptive.runner.playoff.finalist import SAME, Finalist, PlayoffOptions, as_recorded
from tvm_adaptive.runner.playoff.modules import mean_sec
from tvm_adaptive.runner.playoff.rounds import play_rounds
from tvm_adaptive.runner.playoff.verifier import Entry, Verifier
from tvm_adaptive.runner.rpc.leased_worker import LeasingPool
from tvm_adaptive.values.run_folder import FINAL_DIR, FRESH_DIR, RECORD_FILE, WORKLOAD_FILE
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.device_session import use_device
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.pool import WorkerPool

logger = logging.getLogger(__name__)

# If a whole batch is disqualified, the next best records follow, this often: of thousands of
# trials, one in a hundred wrong is dozens, and the fastest of all. A task with more wrong
# ones is better left untuned.
MAX_PLAYOFF_BATCHES = 10
# Enough to see who is clearly slower; the play-off times the others again.
QUALIFYING_ROUNDS = 5
# A record this much slower than the best was not just unlucky and need not be tried again.
_QUALIFY_FACTOR = 2.0
# Built at once while qualifying, between two looks at the clock.
_BUILD_BATCH = 8
# All arguments of all qualifiers stay loaded in one process.
_QUALIFIERS_BYTES = 1 << 30
# Less time does not tell apart variants that differ by a tenth.
_LEAST_PREFETCH_SEC = 1.0


@dataclasses.dataclass(frozen=True)
class FinalistReport:
    """The outcome of one task's play-off."""

    task_name: str
    # the winner first, then the other qualified ones by time, then the disqualified
    finalists: tuple[Finalist, ...]
    # why the play-off ended (see :class:`~tvm_adaptive.runner.playoff.rounds.PlayoffResult`);
    # "no-record" without a record, "not-held" without a play-off, "network" if it was checked
    # within the network instead; "no-time" if the time ended
    # first, and only those checked by then are finalists; "no-reference" if the untuned
    # module could not run; "error" after any other failure
    reason: str
    elapsed_sec: float

    @property
    def winner(self) -> Finalist | None:
        """The fastest finalist that was checked, or None."""
        first = self.finalists[0] if self.finalists else None
        return first if first is not None and first.is_sound else None

    @property
    def unchecked(self) -> str:
        """Why no finalist could be checked; empty if one was."""
        first = self.finalists[0] if self.finalists else None
        return "" if first is None or first.disqualified else first.unchecked

    def with_lost(self, others: Iterable[Finalist]) -> FinalistReport:
        """Add finalists that were disqualified before the play-off."""
        lost = tuple(each for each in others if each.disqualified)
        return dataclasses.replace(self, finalists=(*self.finalists, *lost))

    def as_fields(self) -> dict[str, Any]:
        """Return the report for the journal."""
        candidates = [
            {
                "recorded_ms": finalist.recorded_sec * 1e3,
                "playoff_ms": finalist.playoff_sec * 1e3,
                "stderr_ms": finalist.stderr_sec * 1e3,
                "disqualified": finalist.disqualified,
                "unchecked": finalist.unchecked,
                "prefetches": finalist.prefetches,
            }
            for finalist in self.finalists
        ]
        return {
            "task": self.task_name,
            "candidates": candidates,
            "winner": None if self.winner is None else 0,
            "disqualified": [each["disqualified"] for each in candidates if each["disqualified"]],
            "reason": self.reason,
            "seconds": round(self.elapsed_sec, 6),
        }


def finalist_pool(
    n_threads: int | None = None,
    server: ForkServer | None = None,
    farm: RPCConfig | None = None,
    time_left: Callable[[], float] | None = None,
    *,
    device_index: int = 0,
    suspended: Set[str] = frozenset(),
) -> WorkerPool:
    """Return the worker that runs kernels and libraries; one can serve all tasks of a run."""
    if farm is not None:
        return LeasingPool(farm, server=server, time_left=time_left, suspended=suspended)
    setup = functools.partial(use_device, device_index)
    env = thread_env(n_threads)
    # After a fault, CUDA fails for the rest of a process.
    return WorkerPool(1, setup=setup, replace_after_error=True, env=env, server=server)


def play_off(
    records: Sequence[TuningRecord],
    target: Target,
    options: PlayoffOptions,
    *,
    builder: Builder,
    pool: WorkerPool,
    journal: JournalWriter | None = None,
    task_name: str = "main",
) -> FinalistReport:
    """Check and time a task's best records, fastest first, until one wins."""
    start_sec = time.monotonic()
    journal = journal or NullJournal()
    winner = None
    try:
        # Its folder may not fit on the disk: that costs this task its play-off.
        with contextlib.closing(Verifier(target, builder, pool, options)) as verifier:
            finalists, winner, reason = _play(records, verifier)
    except Exception as error:
        logger.exception("The play-off of %s failed", task_name)
        journal.write("error", where="play_off", task=task_name, message=repr(error))
        finalists, reason = [as_recorded(each, repr(error)) for each in records[:1]], "error"
    # The winner's confirmed time may be above a rival's lucky one.
    finalists.sort(
        key=lambda each: (
            each is not winner,
            bool(each.disqualified),
            not each.is_sound,
            each.final_sec(),
        )
    )
    elapsed_sec = time.monotonic() - start_sec
    report = FinalistReport(task_name, tuple(finalists), reason, elapsed_sec)
    board = {"board": pool.address} if isinstance(pool, LeasingPool) else {}
    journal.write("playoff", **report.as_fields(), **board)
    return report


def without_playoff(
    records: Sequence[TuningRecord], proven: Finalist | None, task_name: str = "main"
) -> FinalistReport:
    """Return the report of a task without a play-off: an earlier winner stays the winner."""
    if proven is not None:
        return FinalistReport(task_name, (proven,), "not-held", 0.0)
    finalists = tuple(as_recorded(record, "no play-off") for record in records[:1])
    return FinalistReport(task_name, finalists, "not-held" if records else "no-record", 0.0)


def final_database(work_dir: str | Path, reports: Iterable[FinalistReport]) -> Database:
    """Write the winners to a new database; the compiler takes other tasks' untuned form.

    Raises MachineError where the disk does not take it; the former database then stays. Other
    files beside it stay in any case.
    """
    final, fresh = Path(work_dir) / FINAL_DIR, Path(work_dir) / FRESH_DIR
    _remove_database(fresh)  # of an attempt that was killed
    try:
        fresh.mkdir(parents=True, exist_ok=True)
        n_winners = copy_winners(reports, json_database(fresh))
        # TVM does not notice what a full disk has not taken.
        n_written = len(json_database(fresh))
        if n_written != n_winners:
            raise MachineError(f"only {n_written} of {n_winners} records were written")
        final.mkdir(exist_ok=True)
        # A kill in between leaves no records, instead of records of other workloads.
        (final / RECORD_FILE).unlink(missing_ok=True)
        for name in (WORKLOAD_FILE, RECORD_FILE):
            os.replace(fresh / name, final / name)
    except Exception as error:  # TVM's parser may raise anything
        raise MachineError(f"{final} cannot be written: {summary_line(error)}") from error
    finally:
        _remove_database(fresh)
    return json_database(final)


def _remove_database(folder: Path) -> None:
    """Remove a database, and its folder unless it holds something else."""
    with contextlib.suppress(OSError):
        for name in (WORKLOAD_FILE, RECORD_FILE):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def copy_winners(reports: Iterable[FinalistReport], database: Database) -> int:
    """Copy the winners of play-offs to a database; return how many there are."""
    winners = [report.winner for report in reports if report.winner is not None]
    for winner in winners:
        copy_record(winner.record, database, [winner.final_sec()])
    return len(winners)


def _play(
    records: Sequence[TuningRecord], verifier: Verifier
) -> tuple[list[Finalist], Finalist | None, str]:
    """Return the finalists, the winner, and why the play-off ended."""
    if not records:
        return [], None, "no-record"
    options = verifier.options
    entries = [
        Entry(Finalist(record, mean_sec(record), is_draft=not record.run_secs))
        for record in records
    ]
    finalists: list[Finalist] = []
    winner, reason = None, "failed"
    try:
        if problem := verifier.prepare_reference(records[0].workload.mod):
            return [as_recorded(records[0], f"no reference: {problem}")], None, "no-reference"
        ranked = entries
        if options.n_qualifiers > options.top_k and len(entries) > options.top_k:
            ranked, unfit = _qualify(entries, verifier)
            finalists += [entry.finalist for entry in unfit]
        for start in range(0, len(ranked), options.top_k)[:MAX_PLAYOFF_BATCHES]:
            batch = ranked[start : start + options.top_k]
            verifier.build_timed(batch)
            verifier.check(batch)
            checked = [entry for entry in batch if entry.is_checked]
            winner, reason = _time(checked, verifier, options.max_sec)
            finalists += [entry.finalist for entry in batch]
            if winner is not None and options.prefetch:
                winner = _try_prefetching(winner, verifier) or _fastest(checked)
            if winner is not None:
                break
    except (OutOfTimeError, NoDeviceError, MachineError) as error:
        is_over = isinstance(error, OutOfTimeError)
        known = [entry.finalist for entry in entries if entry.is_checked]
        out = [each.finalist for each in entries if each.finalist.disqualified]
        if not (is_over or known or out):
            raise
        if winner is None or winner.finalist.disqualified:
            winner = _fastest(entries)
        if not known:
            rest = (each.finalist for each in entries if not each.finalist.disqualified)
            known = [as_recorded(each.record, summary_line(error)) for each in rest][:1]
        finalists, reason = [*known, *out], "no-time" if is_over else "error"
    return finalists, None if winner is None else winner.finalist, reason


def _fastest(entries: Iterable[Entry]) -> Entry | None:
    """Return the fastest of those that were checked."""
    checked = (entry for entry in entries if entry.is_checked)
    return min(checked, key=lambda entry: entry.finalist.final_sec(), default=None)


def _qualify(entries: list[Entry], verifier: Verifier) -> tuple[list[Entry], list[Entry]]:
    """Rank the first entries by a few short rounds; also return those that failed."""
    # The fastest of thousands of short timings were lucky; newer ones, side by side, are fairer.
    options = verifier.options
    # The other half of the time is for the checks, without which nothing wins.
    qualifying_sec = min(options.qualifying_sec, verifier.left_sec() / 2)
    deadline_sec = time.monotonic() + qualifying_sec
    # Not of the first, whose time may be a mistake: then no other one would qualify.
    last = entries[min(options.top_k, len(entries)) - 1]
    slowest_sec = _QUALIFY_FACTOR * last.finalist.recorded_sec
    n_wanted = sum(
        entry.finalist.recorded_sec <= slowest_sec for entry in entries[: options.n_qualifiers]
    )
    tried: list[Entry] = []
    # All that are built at once are loaded with arguments of their own.
    n_bytes = max(1, argument_bytes(entries[0].finalist.record.workload.mod))
    n_at_once = min(_BUILD_BATCH, max(1, _QUALIFIERS_BYTES // n_bytes))
    # Building takes at most half of the time, so that all built ones are timed.
    while len(tried) < n_wanted and deadline_sec - time.monotonic() > qualifying_sec / 2:
        batch = entries[len(tried) : min(n_wanted, len(tried) + n_at_once)]
        verifier.build_timed(batch)
        tried += batch
        if sum(each.timed.n_bytes for each in tried if each.timed) > _QUALIFIERS_BYTES:
            break
    ranking: tuple[int, ...] = ()
    if fit := [entry for entry in tried if entry.is_fit]:
        ranking = play_rounds(
            verifier.timer(fit),
            len(fit),
            max_rounds=QUALIFYING_ROUNDS,
            confirm_rounds=0,
            max_sec=max(0.0, deadline_sec - time.monotonic()),
        ).ranking
    unfit = [entry for entry in tried if not entry.is_fit and entry.finalist.disqualified != SAME]
    return [fit[i] for i in ranking] + entries[len(tried) :], unfit


def _time(entries: Sequence[Entry], verifier: Verifier, max_sec: float) -> tuple[Entry | None, str]:
    """Return the fastest entry, and why the rounds ended."""
    if not entries:
        return None, "failed"
    # At least one round is played, besides the start of each kernel.
    max_sec = min(max_sec, verifier.left_sec() / 2)
    result = play_rounds(verifier.timer(entries), len(entries), max_sec=max_sec)
    for index, entry in enumerate(entries):
        entry.finalist.playoff_sec = float(result.location_sec[index])
        entry.finalist.stderr_sec = float(result.stderr_sec[index])
    return (entries[result.ranking[0]] if result.ranking else None), result.reason


def _try_prefetching(winner: Entry, verifier: Verifier) -> Entry | None:
    """Give the winner its variant that prefetches weights if faster; None if it fails beside it."""
    finalist, max_sec = winner.finalist, verifier.options.max_sec
    if winner.timed is None or winner.timed.device_type != "cpu" or max_sec < _LEAST_PREFETCH_SEC:
        return winner
    try:
        records = hinted(finalist.record, winner.timed.weights)
    except Exception:  # prefetching saves a tenth at best and must not cost the play-off
        logger.warning("The winner gets no variant that prefetches weights", exc_info=True)
        return winner
    variants = [Entry(Finalist(record, finalist.recorded_sec)) for record in records]
    verifier.build_timed(variants)
    fit = [each for each in variants if each.is_fit]
    if not (fit := verifier.with_equal_results(winner, fit)):
        return None if finalist.disqualified else winner
    best, _ = _time([winner, *fit], verifier, max_sec / 2)
    if finalist.disqualified:
        return None
    if best is not None and best is not winner:
        finalist.record, finalist.prefetches = best.finalist.record, True
        finalist.playoff_sec = best.finalist.playoff_sec
        finalist.stderr_sec = best.finalist.stderr_sec
    return winner
