"""Codecs: how a chunk's values are encoded on the wire. Pure."""
