"""Moves, without torch: cards of methods, and edits of plans and layouts."""
