"""Traces of whole jobs, operation by operation: the program they imply, and what their steps lose."""
