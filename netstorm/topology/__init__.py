"""From a network to a policy: pure functions, one file an algorithm."""
