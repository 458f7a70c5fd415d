"""Records that outlive a run."""
