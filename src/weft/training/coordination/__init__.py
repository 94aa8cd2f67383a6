"""Agreement between the ranks of a job, their meetings, and the detection of hangs."""
