"""What ranks exchange: messages over connections of their own, collectives over process groups."""
