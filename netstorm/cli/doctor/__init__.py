"""`netstorm doctor`: what is wrong with a machine, between machines, or was with a job; and what to do."""
