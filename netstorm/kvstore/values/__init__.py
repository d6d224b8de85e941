"""What the bytes of a chunk mean: keys, and the dense, quantised and row-sparse forms. Pure."""
