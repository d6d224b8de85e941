"""The cluster clock over SNTP, and virtual time for the simulated cluster."""
