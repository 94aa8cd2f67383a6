"""Context parallelism: the ranks that divide the tokens of a sample, and what follows from it."""
