"""How the ranks of a job agree, wait for each other, and are noticed when they hang."""
