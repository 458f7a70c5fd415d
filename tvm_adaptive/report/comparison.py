"""A comparison in words: the tuned network, and what it was compared with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from tvm_adaptive.tuning.outcome import Comparison, PeerTiming

# Where neither an interrupt nor a lack of time is why there is no comparison.
NOT_RUN = "the tuned result could not be run; see the journal"


def peer_lines(peers: Sequence[PeerTiming]) -> list[str]:
    """Return one line for each framework that was timed."""
    return [_peer_line(peer) for peer in peers]


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return a line on the outputs, after one on latency where no framework's line has it."""
    verdict = "agree" if comparison.agree else "DISAGREE: do not use this result"
    if comparison.framework and comparison.agree:
        verdict += f" with {comparison.framework}"
    apart = f"{comparison.max_abs:.2g} absolute, {comparison.max_rel:.2g} relative"
    lines = [f"outputs       {verdict}; largest difference {apart}"]
    if comparison.problem:
        lines.append(f"  {comparison.problem}")
    if all(peer.framework != comparison.framework for peer in comparison.peers):
        lines.insert(0, f"latency       {_latency_text(comparison)}")
    return lines


def failure_text(failure: str) -> str:
    """Say which error has kept the tuned library from being made."""
    return f"the tuned library could not be made: {failure}"


def threads_text(secs: Mapping[int, float]) -> str:
    """Return the latencies by number of threads, e.g. ``"2: 4.51 ms, 1: 8.02 ms"``."""
    return ", ".join(f"{count}: {_ms(sec)}" for count, sec in secs.items())


def _latency_text(comparison: Comparison) -> str:
    before, after = comparison.before_sec * 1e3, comparison.after_sec * 1e3
    if not math.isfinite(after):
        return "not timed"
    if not math.isfinite(before):
        return f"{after:.3f} ms tuned"
    return f"{before:.3f} ms untuned, {after:.3f} ms tuned, {speed_text(before, after)}"


def speed_text(before: float, after: float) -> str:
    """Return how much faster or slower something has become, e.g. ``"2.0 x faster"``."""
    if before < after:
        return f"{after / before:.1f} x slower"
    return f"{before / after:.1f} x faster"


def _peer_line(peer: PeerTiming) -> str:
    """Return one line, e.g. ``"1.12 x faster than ONNX Runtime 1.32.0 (2 threads): ..."``."""
    rounds = list(zip(peer.secs, peer.tuned_secs, strict=True))
    is_slower = peer.speedup < 1.0
    ratios = [tuned / theirs if is_slower else theirs / tuned for theirs, tuned in rounds]
    ratio = f"{1.0 / peer.speedup if is_slower else peer.speedup:.2f}"
    words = f"{ratio} x {'slower' if is_slower else 'faster'} than"
    threads = f"{peer.n_threads} thread{'s' * (peer.n_threads != 1)}"
    ours, theirs = statistics.median(peer.tuned_secs), statistics.median(peer.secs)
    text = (
        f"{'as fast as' if ratio == '1.00' else words} {peer.framework} ({threads}): "
        f"{_ms(ours)}, was {_ms(theirs)}; {min(ratios):.2f} to {max(ratios):.2f} x in "
        f"{len(rounds)} round{'s' * (len(rounds) != 1)}"
    )
    return text if peer.agree else f"{text}; its outputs differ"


def _ms(seconds: float) -> str:
    """Return milliseconds with three digits."""
    ms = 1e3 * seconds
    return f"{ms:.0f} ms" if ms >= 99.95 else f"{ms:#.3g} ms"
