"""Several engines behind one pool, measured with real processes on loopback: see `__main__`."""
