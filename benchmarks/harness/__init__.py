"""What the benchmarks share: groups of worker processes, exact test values, memory, results."""
