"""A package of others that adds to weft."""
