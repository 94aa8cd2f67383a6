"""Samples: where they come from, how they become tokens, and which ones make a step."""
