"""The quality of the cost model: its predictions of other people's runs compared with their measurements."""
