"""Synchronous rounds: which policy a round runs under, and how its chunks are summed and passed on. Pure."""
