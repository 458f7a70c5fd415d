"""Compile candidates."""
