"""Attacks on purpose, each with the figure that was asked: `python -m benchmarks.adversary`."""
