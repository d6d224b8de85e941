"""What the examples on digits share: options, data, shards, models, progress, results."""
