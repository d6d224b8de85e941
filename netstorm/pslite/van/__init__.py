"""What moves frames: the interface, and a network in memory for tests and the simulated cluster. Pure."""
