"""A race of systems on one network: its options, what is written down of it, and its pictures."""
