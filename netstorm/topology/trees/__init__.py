"""What schemes are built from: shortest paths, spanning trees, delays, shares, look-ahead."""
