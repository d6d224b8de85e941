"""The path of a part: auxiliary paths, relays, and detours around failed links. Pure."""
