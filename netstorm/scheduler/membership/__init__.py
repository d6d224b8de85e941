"""Who is in the job: admission, rendezvous, liveness, barriers. Pure."""
