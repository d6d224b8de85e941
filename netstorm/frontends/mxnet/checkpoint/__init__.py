"""Checkpoints of a store: its values, its optimiser's states, and how a new job takes them over."""
