"""The I/O thread of a real process, and what puts a machine on real sockets."""
