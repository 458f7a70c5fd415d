"""The table of models and peers."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.stats import geometric_mean
from tvm_adaptive.models.frontend import PEERS
from tvm_adaptive.tuning.outcome import Comparison


@dataclasses.dataclass(frozen=True)
class PeerRatio:
    """How many times slower a framework is than the tuned library."""

    ratio: float  # of the medians of all rounds
    least: float  # of any round
    most: float


@dataclasses.dataclass(frozen=True)
class Row:
    """A model of the table."""

    model: str
    budget_sec: float
    tuned_ms: float  # median of all rounds
    n_rounds: int
    peers: Mapping[str, PeerRatio]
    max_abs: float  # largest difference from the model's own framework
    agrees: bool
    error: str = ""

    @property
    def best_ratio(self) -> float:
        """The ratio to the fastest framework."""
        return min((each.ratio for each in self.peers.values()), default=0.0)


def row_of(fields: Mapping[str, Any]) -> Row:
    """Return the row of what was written down of a model."""
    name, budget_sec = str(fields["model"]), float(fields["budget_sec"])
    if "error" in fields:
        return Row(name, budget_sec, 0.0, 0, {}, 0.0, False, str(fields["error"]))
    comparisons = [Comparison.from_fields(each) for each in fields["timings"]]
    rounds: dict[str, list[tuple[float, float]]] = {}
    for comparison in comparisons:
        for peer in comparison.peers:
            pairs = zip(peer.secs, peer.tuned_secs, strict=True)
            rounds.setdefault(peer.name, []).extend(pairs)
    tuned_secs = [sec for each in comparisons for sec in each.peers[0].tuned_secs]
    return Row(
        *(name, budget_sec, 1e3 * statistics.median(tuned_secs), len(tuned_secs)),
        {peer: _ratio(pairs) for peer, pairs in rounds.items()},
        max(each.max_abs for each in comparisons),
        all(each.agree for each in comparisons),
    )


def _ratio(pairs: Sequence[tuple[float, float]]) -> PeerRatio:
    each = [peer_sec / tuned_sec for peer_sec, tuned_sec in pairs]
    peer_secs, tuned_secs = zip(*pairs, strict=True)
    ratio = statistics.median(peer_secs) / statistics.median(tuned_secs)
    return PeerRatio(ratio, min(each), max(each))


def table(rows: Sequence[Row]) -> str:
    """Return the table in Markdown; ratios above 1 are in favour of the tuned library."""
    lines = [
        f"| model | budget | ours | {' | '.join(PEERS)} | best | outputs |",
        "|---" * (len(PEERS) + 5) + "|",
    ]
    for row in rows:
        if row.error:
            lines.append(f"| {row.model} | {row.budget_sec:g} s | {row.error} |")
            continue
        cells = [_cell(row.peers.get(name)) for name in PEERS]
        outputs = f"{'agree' if row.agrees else 'differ'} ({row.max_abs:.1g})"
        lines.append(
            f"| {row.model} | {row.budget_sec:g} s | {row.tuned_ms:.3g} ms | "
            f"{' | '.join(cells)} | **{row.best_ratio:.2f}** | {outputs} |"
        )
    timed = [row.best_ratio for row in rows if row.peers]
    if len(timed) > 1:
        mean = geometric_mean(timed)
        lines += [
            "",
            f"Geometric mean of the best peer's ratio: {mean:.2f} ({len(timed)} models).",
        ]
    return "\n".join(lines)


def _cell(ratio: PeerRatio | None) -> str:
    return "" if ratio is None else f"{ratio.ratio:.2f} ({ratio.least:.2f} to {ratio.most:.2f})"
