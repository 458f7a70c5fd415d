"""How fast a kernel can possibly be: what is faster did not compute what it should."""

from __future__ import annotations

# More than any processor sold today, and operations per cycle and core of the widest units
# there are, by the bits of the narrowest operand: two AVX-512 multiply-adds of 32 bits, a
# tile unit's of 16 and of 8.
_HIGHEST_HZ = 6e9
_OPS_PER_CYCLE = {8: 4096, 16: 2048, 32: 64}
# Operations on zeros that padding and dilation put in are counted, and may be left out: a
# transposed convolution of stride 2 has a quarter of them left.
_LEFT_OUT = 4.0


def fastest_believable_sec(flop: float, n_cores: int | None, bits: int) -> float:
    """Return the seconds that a kernel takes at the very least on a CPU."""
    if n_cores is None:
        return 0.0
    width = next((known for known in sorted(_OPS_PER_CYCLE) if bits <= known), 32)
    return flop / (n_cores * _HIGHEST_HZ * _OPS_PER_CYCLE[width] * _LEFT_OUT)
