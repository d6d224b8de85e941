"""Elastic jobs: what a newcomer gets of a store and its script, who contributes, and waits for nodes."""
