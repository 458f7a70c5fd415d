"""What a network is worth after short and long budgets."""
