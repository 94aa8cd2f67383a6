"""Rows of words and figures that pages and terminals both show."""
