"""The tables of a RUN.toml: what is trained, and on what and how."""
