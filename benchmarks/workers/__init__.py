"""What runs in the processes that benchmarks start, one module a benchmark."""
