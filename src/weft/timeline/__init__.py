"""Timelines of instructions, predicted and measured."""
