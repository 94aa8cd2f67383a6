"""Cost model, memory model, simulator and the ledger that scores them."""
