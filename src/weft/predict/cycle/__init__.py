"""One cycle of a Program: when instructions start and end, and what slows them meanwhile."""
