"""The thread and the event loop of a real process: what puts a machine on real sockets."""
