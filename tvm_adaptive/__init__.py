"""Adaptive auto-tuning for Apache TVM's MetaSchedule."""

__version__ = "0.1.0"
