"""Scripts that produce every figure the README quotes: run one with `python -m benchmarks.NAME`."""
