"""MXNet's arrays: what is checked, copied and handed to the network."""
