"""From decisions to a Program, and the planners that make decisions."""
