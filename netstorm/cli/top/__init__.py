"""`netstorm top`: a live view of a running job."""
