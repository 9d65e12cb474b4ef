"""`sidecar serve --workers N`: processes that serve one port and share one pool, and the supervisor that keeps them.

The supervisor takes no requests. It binds the port without listening, so that the port stays its own; each worker binds
it, too (`SO_REUSEPORT`), and listens. The pool is in a store: the policy's, or a Valkey that the supervisor starts. The
admin port is the supervisor's, and shows all workers as one.
"""
