"""Membership, ranks, keys, policies and their consistency, and the process that runs them."""
