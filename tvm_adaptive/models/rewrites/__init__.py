"""Rewrites of a network on its way to functions, and our own ways to lower its operators."""
