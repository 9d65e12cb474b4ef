"""Servers that have no place for a middleware: what starts the real one with the door mounted in it."""
