"""The output of a job: its processes' lines, and the launcher's own."""
