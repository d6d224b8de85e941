"""`netstorm launch`: starts the processes of a job, here or through ssh, and ends them."""
