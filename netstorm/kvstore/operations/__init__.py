"""What a user asks for, and what a node tells its driver to do. Pure."""
