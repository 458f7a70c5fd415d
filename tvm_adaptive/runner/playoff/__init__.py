"""The play-off of a task: its best records are checked and timed side by side."""
