"""The variables that tell a process of a job who it is: NetStorm's own, and those that PyTorch reads."""
