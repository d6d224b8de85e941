"""Open MPI as one of the systems that are compared."""
