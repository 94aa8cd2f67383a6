"""Losses and metrics on held-out samples."""
