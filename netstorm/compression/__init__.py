"""Codecs: what a chunk's values look like on the wire."""
