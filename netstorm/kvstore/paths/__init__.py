"""Which way a part goes: auxiliary paths, relays, and detours around failed links. Pure."""
