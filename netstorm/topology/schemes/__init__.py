"""One file a scheme, and the only way in to all of them."""
