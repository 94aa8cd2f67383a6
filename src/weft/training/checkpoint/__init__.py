"""Checkpoints: what they hold, when they are written, which one is whole."""
