"""The pure half of every method: its card and what it adds to a plan or program."""
