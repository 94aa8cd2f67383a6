"""Workers of a local run: their start, watch, end and reports of failures."""
