"""Admission-control middleware: one request from its first byte to its released lease."""
