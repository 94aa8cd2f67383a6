"""The tables of a RUN.toml: the training, its cluster and its plan."""
