"""What a node's own traffic says of its links: busy periods, estimators, reports. Pure."""
