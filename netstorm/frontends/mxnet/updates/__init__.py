"""What a rank does with a sum: optimisers, deferred updates, and their states."""
