"""Finds out whether an engine's priority does anything, and why not where it does not: `sidecar doctor`.

Three things must be true before a priority acts: the field reaches the engine, the engine's scheduler uses it, and
there is a real queue. And the numbers must be read the right way round. Each fails without an error. So nothing is
believed that was only read: a small burst of requests shows in which order the engine serves them.
"""
