"""Reverse proxy between the middleware and an engine in another process."""
