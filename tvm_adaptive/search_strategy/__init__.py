"""Which candidates to try next."""
