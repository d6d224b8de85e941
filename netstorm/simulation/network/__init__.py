"""The simulated network: how long messages take, and what is recorded of them."""
