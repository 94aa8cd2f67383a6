"""Stages: layers of a model as modules, their forward and backward passes, and the views of methods."""
