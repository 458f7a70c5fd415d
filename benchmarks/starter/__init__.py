"""Tune a published list of small networks, and pack what was found as starter records."""
