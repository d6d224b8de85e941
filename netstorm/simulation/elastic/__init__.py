"""Training programs of simulated jobs that nodes leave and join, and exact checks of their results."""
