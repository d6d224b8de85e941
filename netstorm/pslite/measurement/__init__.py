"""Passive measurement of a node's links by its own traffic: busy periods, estimators, reports. Pure."""
