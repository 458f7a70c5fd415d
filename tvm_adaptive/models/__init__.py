"""Networks and operators to tune."""
