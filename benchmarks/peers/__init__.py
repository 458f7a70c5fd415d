"""Fifteen real models, tuned and timed in turns with what a user would take instead."""
