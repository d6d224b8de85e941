"""What a rank does with a sum: optimizers, deferred updates, and their states."""
