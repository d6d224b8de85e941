"""The values of keys and chunks: the dense, quantised and row-sparse forms. Pure."""
