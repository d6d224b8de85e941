"""The synchronous KVStore: what a training script calls."""
