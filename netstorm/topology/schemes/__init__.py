"""One file a scheme, and the one door to all of them."""
