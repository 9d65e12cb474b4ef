"""The fleet: the engines of one pool as one process sees them, with their addresses, connections and health."""
