"""The run directory: what a run is given, what it says about itself, and who may go on with it."""
