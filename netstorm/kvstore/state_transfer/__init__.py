"""State for ranks that join a job that has begun: the others offer theirs, the newcomer fetches it. Pure."""
