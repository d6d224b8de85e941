"""Keys and rounds: which policy each round of each key runs under, the same at every rank. Pure."""
