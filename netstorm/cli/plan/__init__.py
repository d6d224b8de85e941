"""`netstorm plan`: compares schemes on a network before anything runs on it."""
