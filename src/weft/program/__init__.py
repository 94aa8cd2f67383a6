"""The Program: weft's intermediate representation, its verifier and the orders of micro-batches."""
