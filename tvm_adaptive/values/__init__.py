"""Frozen values and pure helpers that every stage may use."""
