"""What `gluon_digits.py` and `module_digits.py` share: options, data, shards, models, progress, results."""
