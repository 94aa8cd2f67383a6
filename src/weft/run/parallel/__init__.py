"""Ranks that hold one replica of a stage together: tensor parallelism and context parallelism."""
