"""The virtual cluster: real nodes and the real scheduler on virtual time over a virtual network."""
