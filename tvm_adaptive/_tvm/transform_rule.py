"""A schedule rule for the transforms of Winograd's tiles: as many columns as registers hold.

MetaSchedule fuses up to 64 columns into one vector. A tile of 6 x 6 elements then needs 288
registers of AVX2, which has 16: its code takes seconds to compile, and stores nearly everything.
"""

from __future__ import annotations

from typing import Any

from tvm.s_tir.meta_schedule.schedule_rule import PyScheduleRule

from tvm_adaptive._tvm import Schedule, derived_object

# Columns of a vector, largest last: registers of SSE, AVX2 and AVX-512, and two of the latter.
_COLUMNS = (4, 8, 16, 32)
# Fewer choices take fewer trials; smaller vectors are slower.
_N_CHOICES = 3
_NAMES = ("winograd_input", "winograd_output")
# On a loop; MetaSchedule leaves those with an annotation of any name as they are.
_MARK = "tvm_adaptive.columns"
_N_LOOPS = 2  # tiles, and channels or filters


@derived_object
class TileTransform(PyScheduleRule):  # type: ignore[misc]
    """Computes some columns of a tile side by side."""

    def _initialize_with_tune_context(self, _context: Any) -> None:
        """Do nothing: the rule holds for each task."""

    def clone(self) -> Any:
        """Return a rule for another task."""
        return TileTransform()

    def apply(self, sch: Schedule, block: Any) -> list[Schedule]:
        """Return the schedule with the block in vectors if it is a transform, or as it was."""
        loops = sch.get_loops(block)
        if str(sch.get(block).name_hint) not in _NAMES or len(loops) != _N_LOOPS:
            return [sch]
        extent = int(sch.get(loops[-1]).extent)
        choices = [n for n in _COLUMNS if extent % n == 0][-_N_CHOICES:]
        if choices:
            n = sch.sample_categorical(choices, [1.0 / len(choices)] * len(choices))
            _, inner = sch.split(loops[-1], [None, n])
            sch.vectorize(inner)
            # Otherwise MetaSchedule fuses all loops, this one too, and makes vectors of 64.
            sch.annotate(inner, _MARK, 1)
        return [sch]
