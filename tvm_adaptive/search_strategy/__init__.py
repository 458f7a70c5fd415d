"""Which candidates to try next."""

from tvm_adaptive.search_strategy.strategy import AdaptiveSearch

__all__ = ["AdaptiveSearch"]
