"""Checkpoints: their contents, how they are written and read, and how whole ones are found."""
