"""Weights of other programs, read and written."""
