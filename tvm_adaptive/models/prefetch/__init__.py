"""Prefetches of constant weights in tuned functions.

A tuned product visits a group of its weights once for each tile of rows, and then moves on
to the next group. The first visit waits for memory: a core loads some ten gigabytes per
second, and a product with a batch of one could use three times that, while later visits
leave the memory idle. So each visit prefetches its share of the next group. The gain does
not show in timings of a kernel that finds its weights in the cache, and is up to a tenth
in a network, where it does not.

The same instructions run on the same numbers in the same order: results stay the same to
the last bit.
"""

from tvm_adaptive.models.prefetch.rewrite import follow_hints, hinted, hinted_schedules

__all__ = ["follow_hints", "hinted", "hinted_schedules"]
