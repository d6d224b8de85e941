"""Auxiliary paths, and which of them a policy gets."""
