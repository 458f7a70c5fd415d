"""Callbacks that record a run while it runs."""

from tvm_adaptive.measure_callback.journal import Journal, JournalWriter, NullJournal, read_journal

__all__ = ["Journal", "JournalWriter", "NullJournal", "read_journal"]
