"""Lower bounds of a kernel's time: what no processor exceeds, and what this one reaches."""

from __future__ import annotations

from typing import NamedTuple

# A higher clock than any processor has, and operations per cycle and core of the widest
# units by the bits of the narrowest operand: two AVX-512 multiply-adds of 32 bits, a tile
# unit's of 16 and of 8.
_HIGHEST_HZ = 6e9
_OPS_PER_CYCLE = {8: 4096, 16: 2048, 32: 64}
# A byte of a network's weights comes from memory, one of its activations from a shared cache: two
# cores of a Zen 3 do 7 and 1.5 operations in the time of one.
_FLOP_PER_BYTE = 4.0
# A kernel may skip counted operations on the zeros of padding and dilation: a transposed
# convolution of stride 2 does a quarter of its operations.
_MAX_SKIPPED_FACTOR = 4.0


class Roofline(NamedTuple):
    """What a machine's cores reach together (Williams et al., CACM 52, 2009)."""

    flop_per_sec: float  # single precision
    bytes_per_sec: float  # from and to the last cache

    def limit_ms(self, flop: float, n_bytes: float) -> float:
        """Return the least milliseconds for so many operations and bytes."""
        return 1e3 * max(flop / self.flop_per_sec, n_bytes / self.bytes_per_sec)


def work(flop: float, n_bytes: float) -> float:
    """Return operations that take about as long as these operations and bytes together."""
    return flop + _FLOP_PER_BYTE * n_bytes


def fastest_believable_sec(flop: float, n_cores: int | None, bits: int) -> float:
    """Return the seconds below which a kernel has skipped operations; 0 for unknown cores."""
    if n_cores is None:
        return 0.0
    width = next((known for known in sorted(_OPS_PER_CYCLE) if bits <= known), 32)
    return flop / (n_cores * _HIGHEST_HZ * _OPS_PER_CYCLE[width] * _MAX_SKIPPED_FACTOR)
