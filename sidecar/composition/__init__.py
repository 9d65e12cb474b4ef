"""Composition: how a process is put together, whether it serves, is mounted in a server, or only takes leases."""
