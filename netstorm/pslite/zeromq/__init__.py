"""The van over ZeroMQ and TCP: sockets, their options, and what the kernel says of their connections."""
