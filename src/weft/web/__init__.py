"""Pages and pictures: presentation only, no logic."""
