"""SVG pictures: timelines, charts of lines and dots, clusters and memory."""
