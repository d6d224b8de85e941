"""One exactly-once session between two processes: states, queues, windows. Pure."""
