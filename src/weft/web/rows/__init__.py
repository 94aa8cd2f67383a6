"""Rows of text and figures for both pages and terminals."""
