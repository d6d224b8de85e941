"""Who may take part in a job: keys and their files, the allow list, and what follows from a process's key."""
