"""What the end of a run decides: play-offs, forms, and which records are deployed."""
