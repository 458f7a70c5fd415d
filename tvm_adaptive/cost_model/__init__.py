"""Learn from measurements."""
