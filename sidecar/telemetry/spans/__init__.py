"""The spans of a request, from its arrival to its end."""
