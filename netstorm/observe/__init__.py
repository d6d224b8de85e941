"""What happened: events, counters, logging, traces."""
