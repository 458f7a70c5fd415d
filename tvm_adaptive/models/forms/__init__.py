"""Other ways to compute the parts of a network, with fewer operations; measured, not assumed."""

from tvm_adaptive.models.forms.alternatives import Alternatives

__all__ = ["Alternatives"]
