"""Doors to other stacks: plans in their words, and their files in weft's words."""
