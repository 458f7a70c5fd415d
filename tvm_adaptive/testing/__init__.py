"""Tools to test extensions of this package with."""
