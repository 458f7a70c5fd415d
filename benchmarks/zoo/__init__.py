"""Real models and single operators, imported, compiled and compared; nothing is tuned."""
