"""Layers cut out of a user's whole module by `torch.export`."""
