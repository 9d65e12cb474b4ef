"""Launchers of engines' own servers, with the middleware mounted: for servers that have no option for a middleware."""
