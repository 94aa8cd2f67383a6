"""Models, devices, clusters, plans and run files as pure data, without torch."""
