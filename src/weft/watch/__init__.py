"""Runs as they go: their newest figures and steps, and a server that shows them. It only reads."""
