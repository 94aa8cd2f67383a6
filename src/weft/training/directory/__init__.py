"""The run directory: a run's inputs, its records, its lock, and the checks for a resume."""
