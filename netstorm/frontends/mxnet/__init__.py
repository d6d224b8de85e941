"""NetStorm as a store of stock MXNet."""
