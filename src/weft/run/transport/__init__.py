"""The exchange between ranks: messages over their own connections, collectives over process groups."""
