"""What the transport needs of Python and Linux: interpreter lock, allocator, fork, timers, addresses."""
