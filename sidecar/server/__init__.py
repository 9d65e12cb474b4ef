"""HTTP servers: of `sidecar serve` itself, and what a mounted middleware adds to another server."""


class CannotServe(Exception):
    """The server cannot start: a port is taken, an address is not local, the app failed. The message is one line."""
