"""Readers and writers of other programs' weights."""
