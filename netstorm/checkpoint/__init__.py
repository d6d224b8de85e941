"""Checkpoints of a whole job: their format, how ranks write one in shares, and how one is read.

Nothing here knows MXNet or PyTorch.
"""
