"""The report of a run: what it did and why, readable without a network."""

from tvm_adaptive.report.page import write_report
from tvm_adaptive.report.story import Story, read_stories, read_story

__all__ = ["Story", "read_stories", "read_story", "write_report"]
