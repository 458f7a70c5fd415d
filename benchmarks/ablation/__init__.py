"""What single parts bring networks."""
