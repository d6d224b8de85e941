"""`netstorm launch`: starts the processes of a job, here or through ssh or Slurm, and ends them."""
