"""Admission in a server that constructs its middleware itself, from a name."""
