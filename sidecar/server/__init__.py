"""HTTP servers: of `sidecar serve` itself, and what a mounted middleware adds to another server."""
