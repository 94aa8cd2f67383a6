"""Pages: faces only, no logic."""
