"""What is kept of a run while it goes on."""

from tvm_adaptive.measure_callback.journal import Journal, JournalWriter, NullJournal, read_journal

__all__ = ["Journal", "JournalWriter", "NullJournal", "read_journal"]
