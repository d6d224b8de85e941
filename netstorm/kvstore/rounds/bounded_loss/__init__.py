"""Rounds that may end without the smallest contributions: deadlines, what may be missing, what follows."""
