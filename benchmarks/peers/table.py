"""The table of models and peers."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.stats import geometric_mean
from benchmarks.tables import markdown
from tvm_adaptive.models.frontend import PEERS
from tvm_adaptive.tuning.outcome import Comparison, PeerTiming


@dataclasses.dataclass(frozen=True)
class Row:
    """A model of the table."""

    model: str
    budget_sec: float
    seed: int
    tuned_ms: float  # median of all rounds
    n_rounds: int
    peers: Mapping[str, PeerTiming]  # all rounds together
    max_abs: float  # largest difference from the model's own framework
    agrees: bool
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)  # peers, and why
    error: str = ""

    @property
    def best_ratio(self) -> float:
        """The ratio to the fastest framework."""
        return min((each.speedup for each in self.peers.values()), default=0.0)


def row_of(fields: Mapping[str, Any]) -> Row:
    """Return the row of what was written down of a model."""
    run = str(fields["model"]), float(fields["budget_sec"]), int(fields["seed"])
    if "error" in fields:
        return Row(*run, 0.0, 0, {}, 0.0, False, error=str(fields["error"]))
    comparisons = [Comparison.from_fields(each) for each in fields["timings"]]
    peers: dict[str, PeerTiming] = {}
    for peer in (peer for comparison in comparisons for peer in comparison.peers):
        peers[peer.name] = _together(peers[peer.name], peer) if peer.name in peers else peer
    if not peers:
        return Row(*run, 0.0, 0, {}, 0.0, False, error="no other framework was timed")
    tuned_secs = next(iter(peers.values())).tuned_secs
    return Row(
        *(*run, 1e3 * statistics.median(tuned_secs), len(tuned_secs)),
        peers,
        max(each.max_abs for each in comparisons),
        all(each.agree for each in comparisons),
        fields.get("left_out", {}),
    )


def _together(a: PeerTiming, b: PeerTiming) -> PeerTiming:
    secs, tuned_secs = a.secs + b.secs, a.tuned_secs + b.tuned_secs
    return dataclasses.replace(a, secs=secs, tuned_secs=tuned_secs)


def table(rows: Sequence[Row]) -> str:
    """Return a table in Markdown for each budget and seed.

    Ratios above 1 are in favour of the tuned library.
    """
    runs = dict.fromkeys((row.budget_sec, row.seed) for row in rows)
    return "\n\n".join(
        _table([row for row in rows if (row.budget_sec, row.seed) == run]) for run in runs
    )


def _table(rows: Sequence[Row]) -> str:
    """Return the table of one budget and seed, with the mean of the ratios to the best peer."""
    head = ["model", "budget", "ours", *PEERS, "best", "outputs"]
    text = markdown(head, [_cells(row) for row in rows])
    timed = [row.best_ratio for row in rows if row.peers]
    if len(timed) > 1:
        mean = geometric_mean(timed)
        text += f"\n\nGeometric mean of the best peer's ratio: {mean:.2f} ({len(timed)} models)."
    left_out = [
        f"- {row.model}, {framework}: {reason}"
        for row in rows
        for framework, reason in row.left_out.items()
    ]
    if left_out:
        text += "\n\nLeft out of some rounds:\n\n" + "\n".join(left_out)
    return text


def _cells(row: Row) -> list[str]:
    first = [row.model, f"{row.budget_sec:g} s"]
    if row.error:
        return [*first, row.error, *[""] * (len(PEERS) + 2)]
    cells = [_cell(row.peers.get(name)) for name in PEERS]
    outputs = f"{'agree' if row.agrees else 'differ'} ({row.max_abs:.1g})"
    return [*first, f"{row.tuned_ms:.3g} ms", *cells, f"**{row.best_ratio:.2f}**", outputs]


def _cell(peer: PeerTiming | None) -> str:
    if peer is None:
        return ""
    each = [theirs / tuned for theirs, tuned in zip(peer.secs, peer.tuned_secs, strict=True)]
    return f"{peer.speedup:.2f} ({min(each):.2f} to {max(each):.2f})"
