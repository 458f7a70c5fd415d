"""Compile candidates."""

from tvm_adaptive.builder.persistent import PersistentBuilder

__all__ = ["PersistentBuilder"]
