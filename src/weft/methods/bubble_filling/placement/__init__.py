"""Ways to place work in gaps, one file each."""
