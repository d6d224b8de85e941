"""The systems that are compared: how each is started, and how one of its workers reduces."""
