"""Ranks that hold one replica of a stage together: by tensors, by tokens."""
