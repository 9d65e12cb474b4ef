"""Dry run (`mode: observe`): requests pass at once, and shadow requests show what enforcing would do."""
