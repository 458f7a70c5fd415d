"""A run: its options and budget, from the model that comes in to the library that goes out."""
