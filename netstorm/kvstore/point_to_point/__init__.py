"""Sends and receives between two ranks: matching, flow control, and what follows when a rank ends. Pure."""
