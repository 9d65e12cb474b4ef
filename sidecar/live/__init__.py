"""What people look at on the admin port: the live page, its stream, metrics, and one request's story."""
