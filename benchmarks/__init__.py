"""Benchmarks: what is compared, the runs, and what is made of their journals."""
