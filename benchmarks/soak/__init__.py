"""Half an hour of overload with faults, and a count of everything at the end. `python -m benchmarks.soak --help`."""
