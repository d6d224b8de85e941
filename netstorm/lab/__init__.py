"""The laboratory: simulated and emulated networks, what tests share, and the commands that need them."""
