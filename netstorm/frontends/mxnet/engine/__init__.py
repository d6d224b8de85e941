"""Asynchronous operations on MXNet's dependency engine, and their errors."""
