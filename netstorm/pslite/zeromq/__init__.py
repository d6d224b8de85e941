"""The van over ZeroMQ and TCP: sockets, their options, and the kernel's state of their connections."""
