"""Models, devices, clusters, plans and run files as data. Pure: nothing here imports torch."""
