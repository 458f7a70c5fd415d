"""Forecast the best throughput of a task at the end of its next slot."""
