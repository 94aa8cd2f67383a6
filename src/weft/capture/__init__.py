"""Measurements of this machine and of a model's layers (imports torch)."""
