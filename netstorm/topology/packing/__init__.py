"""Packed trees: candidates, the linear program over them, and whole chunks."""
