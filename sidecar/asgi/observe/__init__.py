"""`mode: observe`: the request passes, and its shadow goes through the pool."""
