"""A node's view of the job: the other nodes, the session with the scheduler, barriers, status. Pure."""
