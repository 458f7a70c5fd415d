"""The vector registers of a processor, as its target tells."""

from __future__ import annotations

import dataclasses

from tvm_adaptive._tvm import Target, has_feature


@dataclasses.dataclass(frozen=True)
class VectorUnit:
    """The vector registers of a core."""

    lanes: int  # 32-bit numbers in a register
    n_registers: int

    @property
    def has_many_registers(self) -> bool:
        """Whether tiles of more sums are fast than 16 registers hold."""
        return self.n_registers >= 32


def vector_unit_of(target: Target) -> VectorUnit:
    """Return the vector registers of a processor."""
    if has_feature(target, "avx512f"):
        return VectorUnit(16, 32)
    if has_feature(target, "avx"):
        return VectorUnit(8, 16)
    # SSE and Neon have vectors of four numbers.
    return VectorUnit(4, 32 if has_feature(target, "neon") else 16)
