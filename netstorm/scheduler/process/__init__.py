"""The scheduler's process: sockets, threads, files, and a worker process that forms policies."""
