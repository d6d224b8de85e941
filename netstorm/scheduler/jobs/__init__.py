"""Several jobs on one scheduler: admission control, settings, shares of the network. Pure."""
