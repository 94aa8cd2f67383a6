"""The laws that the verifier proves, one file per law. They do not depend on the builder of a program."""
