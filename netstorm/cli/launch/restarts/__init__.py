"""What `netstorm launch --restarts` starts again: one process of a job that goes on, or the whole job."""
