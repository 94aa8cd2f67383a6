"""What the verifier proves, one file per law. None of it knows how a program was built."""
