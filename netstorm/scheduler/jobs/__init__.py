"""Several jobs on one scheduler: admission, settings, shares of the network. Pure."""
