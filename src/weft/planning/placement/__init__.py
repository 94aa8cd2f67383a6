"""Operators of one step, placed on unequal devices with limited memory (Baechi, SoCC 2020)."""
