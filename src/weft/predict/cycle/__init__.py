"""One cycle of a Program: the start and end of its instructions, and their slowdowns."""
