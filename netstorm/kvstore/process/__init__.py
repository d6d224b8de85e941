"""The shell around a general node: threads, sockets, signals, metrics, and how the process ends."""
