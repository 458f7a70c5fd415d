"""Weights that are asked for before they are needed.

A tuned product visits a group of its weights again and again, once for each tile of rows,
and then goes on to the next group. Whoever comes first waits for memory: a core brings in
some ten gigabytes per second, and a product with a batch of one could use three times
that, while the later visits leave the memory idle. So each visit asks for its share of the
next group. That is invisible to timings of a kernel that finds its weights in the cache,
and worth a tenth of it in a network, where it does not.

The same instructions run on the same numbers in the same order: results do not change, to
the last bit.
"""

from tvm_adaptive.models.prefetch.hints import hinted
from tvm_adaptive.models.prefetch.rewrite import follow_hints

__all__ = ["follow_hints", "hinted"]
