"""What happens to runs when things go wrong."""
