"""The finish of a task: its best few are checked, timed side by side, and recorded so.

Checked means: run on the same random values as the untuned module, with the same
result. A finalist that computes something else, crashes or hangs can never win, nor can
one that could not be checked.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    Builder,
    Database,
    RPCConfig,
    Target,
    TuningRecord,
    copy_record,
    ms,
)
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.journal import JournalWriter, NullJournal
from tvm_adaptive.runner.playoff.contest import Contest, ContestOptions
from tvm_adaptive.runner.playoff.finalist import Finalist, as_recorded
from tvm_adaptive.runner.playoff.worker import warm_up
from tvm_adaptive.runner.rpc.leased_worker import LeasingPool
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.pool import WorkerPool

logger = logging.getLogger(__name__)

# The untuned module is the slowest of all and is run only once or twice: a large
# convolution takes a minute.
REFERENCE_TIMEOUT_SEC = 120.0


@dataclasses.dataclass(frozen=True)
class FinalistReport:
    """The outcome of one task's play-off."""

    task_name: str
    # the winner first, then the other qualified ones by time, then the disqualified
    finalists: tuple[Finalist, ...]
    # why the play-off ended (see :class:`~tvm_adaptive.runner.playoff.rounds.PlayoffResult`),
    # ``"no-record"`` if there was nothing to play for; ``"not-held"`` if none was held, ``"no-
    # time"`` if the time was over first, and only who was checked by then is a finalist, ``"no-
    # reference"`` if the untuned module could not be run, ``"error"`` if something else failed:
    # then only what an earlier play-off has proven can win
    reason: str
    elapsed_sec: float

    @property
    def winner(self) -> Finalist | None:
        """The fastest finalist that was checked, or None."""
        first = self.finalists[0] if self.finalists else None
        return first if first is not None and first.is_sound else None

    @property
    def unchecked(self) -> str:
        """Why nothing of what there was could be checked; empty if something was."""
        first = self.finalists[0] if self.finalists else None
        return "" if first is None or first.disqualified else first.unchecked


def finalist_pool(
    n_threads: int | None = None,
    server: ForkServer | None = None,
    farm: RPCConfig | None = None,
    time_left: Callable[[], float] | None = None,
) -> WorkerPool:
    """Return the worker that play-offs run in; one can serve all tasks of a run."""
    if farm is not None:
        return LeasingPool(farm, server=server, time_left=time_left)
    return WorkerPool(
        1, setup=warm_up, replace_after_error=True, env=thread_env(n_threads), server=server
    )


def play_off(
    records: Sequence[TuningRecord],
    target: Target,
    *,
    builder: Builder,
    top_k: int = 3,
    n_qualifiers: int = 0,
    qualifying_sec: float = 5.0,
    prefetch: bool = True,
    timeout_sec: float = 30.0,
    reference_timeout_sec: float = REFERENCE_TIMEOUT_SEC,
    rtol: float | None = None,
    atol: float | None = None,
    max_sec: float = 5.0,
    limit_sec: float = math.inf,
    repeat_ms: float = 20.0,
    seed: int = 0,
    device_index: int = 0,
    journal: JournalWriter | None = None,
    task_name: str = "main",
    pool: WorkerPool | None = None,
    scratch_dir: str | Path | None = None,
) -> FinalistReport:
    """Check and time a task's best records again."""
    if top_k < 1:
        raise InvalidOptionError(f"top_k must be at least 1 but got {top_k}.")
    start_sec = time.monotonic()
    journal = journal or NullJournal()
    options = ContestOptions(
        timeout_sec=timeout_sec,
        reference_timeout_sec=reference_timeout_sec,
        rtol=rtol,
        atol=atol,
        max_sec=max_sec,
        repeat_ms=repeat_ms,
        seed=seed,
        device_index=device_index,
        scratch_dir=None if scratch_dir is None else str(scratch_dir),
        n_qualifiers=n_qualifiers,
        qualifying_sec=qualifying_sec,
        prefetch=prefetch,
        end_sec=start_sec + limit_sec,
    )
    contest = Contest(target, builder, pool or finalist_pool(), options)
    try:
        finalists, reason = contest.hold(records, top_k)
    except Exception as error:
        logger.exception("The play-off of %s could not be held", task_name)
        journal.write("error", where="play_off", task=task_name, error=repr(error))
        finalists, reason = [as_recorded(each, repr(error)) for each in records[:1]], "error"
    finally:
        contest.close()
        if pool is None:
            contest.pool.close()
    ranked = _ranked(finalists, contest.winner)
    report = FinalistReport(task_name, ranked, reason, time.monotonic() - start_sec)
    journal.write("playoff", **_as_fields(report), **_board_of(pool))
    return report


def _board_of(pool: WorkerPool | None) -> dict[str, str]:
    return {"board": pool.address} if isinstance(pool, LeasingPool) else {}


def _ranked(finalists: Iterable[Finalist], winner: Finalist | None) -> tuple[Finalist, ...]:
    ranked = sorted(
        finalists, key=lambda each: (bool(each.disqualified), not each.is_sound, each.final_sec())
    )
    # Confirmed by timings of its own, the winner may look slower than a rival's lucky ones.
    return tuple(sorted(ranked, key=lambda each: winner is not None and each is not winner))


def without_playoff(
    records: Sequence[TuningRecord], proven: Finalist | None, task_name: str = "main"
) -> FinalistReport:
    """Return the report of a task that gets no play-off: what was proven before stands."""
    if proven is not None:
        return FinalistReport(task_name, (proven,), "not-held", 0.0)
    finalists = tuple(as_recorded(record, "no play-off") for record in records[:1])
    return FinalistReport(task_name, finalists, "not-held" if records else "no-record", 0.0)


def final_database(
    work_dir: str | Path, module_equality: str, reports: Iterable[FinalistReport]
) -> Database:
    """Write the winners with their play-off times as a database of their own.

    A task without a winner is left out: the compiler then takes its untuned form.
    """
    final, fresh = Path(work_dir) / "final", Path(work_dir) / "final.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    database = ms.database.JSONDatabase(work_dir=str(fresh), module_equality=module_equality)
    for report in reports:
        if report.winner is not None:
            copy_record(report.winner.record, database, [report.winner.final_sec()])
    shutil.rmtree(final, ignore_errors=True)
    os.replace(fresh, final)
    return ms.database.JSONDatabase(work_dir=str(final), module_equality=module_equality)


def _as_fields(report: FinalistReport) -> dict[str, Any]:
    candidates = [
        {
            "recorded_ms": finalist.recorded_sec * 1e3,
            "playoff_ms": finalist.playoff_sec * 1e3,
            "stderr_ms": finalist.stderr_sec * 1e3,
            "disqualified": finalist.disqualified,
            "unchecked": finalist.unchecked,
            "prefetches": finalist.prefetches,
        }
        for finalist in report.finalists
    ]
    return {
        "task": report.task_name,
        "candidates": candidates,
        "winner": None if report.winner is None else 0,
        "disqualified": [each["disqualified"] for each in candidates if each["disqualified"]],
        "reason": report.reason,
        "seconds": round(report.elapsed_sec, 6),
    }
