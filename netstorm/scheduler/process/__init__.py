"""The shell around the scheduler's state machine: sockets, threads, files, formation in a worker process."""
