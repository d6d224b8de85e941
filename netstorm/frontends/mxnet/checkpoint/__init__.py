"""Checkpoints of a store: its values, its optimizer's states, and how a new job takes them over."""
