"""From the nodes' reports to an estimate of the network. Pure."""
