"""The command line: presentation only, no logic."""
