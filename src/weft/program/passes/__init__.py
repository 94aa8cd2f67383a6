"""Passes over a lowered pipeline: each adds or moves communication and leaves the computations alone."""
