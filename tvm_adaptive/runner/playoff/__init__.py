"""The play-off of a task: check the best records, time them side by side."""
