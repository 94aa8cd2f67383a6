"""Samples: their sources, their tokens and their order in the steps."""
