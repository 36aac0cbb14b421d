"""The rows of the benchmark, a family a file."""
