"""One request: from its head and body, by its turn in the pool, to its answer."""
