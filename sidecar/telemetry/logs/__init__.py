"""The log: a line for what went wrong with a request, and for every change of state."""
