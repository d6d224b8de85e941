"""Fault plans, Hypothesis strategies and conformance suites, shipped for users too."""
