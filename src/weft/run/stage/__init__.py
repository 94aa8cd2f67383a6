"""Stages: layers of a model as modules, how they run forward and back, and what methods see of them."""
