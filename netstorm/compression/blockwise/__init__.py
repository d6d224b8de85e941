"""Codecs of which a block of values shares a scale. Pure."""
