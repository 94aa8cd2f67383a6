"""Measured times of instructions."""
