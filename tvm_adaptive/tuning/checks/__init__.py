"""The checks of a model before and after its search: outputs, latency, and what differs."""
