"""The asynchronous KVStore: owners, and what other ranks ask of them."""
