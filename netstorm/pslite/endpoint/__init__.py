"""All sessions of one process, and the machine on top of them. Pure."""
