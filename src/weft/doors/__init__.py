"""Doors to other stacks: plans written in their words, and their files read in weft's."""
