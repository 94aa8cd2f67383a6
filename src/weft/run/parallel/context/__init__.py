"""Context parallelism: the ranks that divide the tokens of a sample, their attention and their losses."""
