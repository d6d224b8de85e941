"""Asynchronous training: owners, their blocks, and the pushes and pulls that they serve. Pure."""
