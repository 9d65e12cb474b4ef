"""`sidecar serve --workers N`: processes that serve one port and share one pool, and the supervisor that keeps them.

The supervisor takes no requests. It binds the port without listening, so that the port stays its own; each worker has a
socket of its own there (`SO_REUSEPORT`), and listens. The pool is in a store: the policy's, or a Valkey that the
supervisor starts. The admin port is the supervisor's, and shows all workers as one.

Uvicorn's supervisor (0.54, `supervisors/multiprocess.py`) would not do. It has all workers accept on one socket, where
the system prefers the one that slept last, and one of them gets nearly every kept connection. It starts a process that
ends at its start again without a pause and without an end, restarts where SIGHUP should reload, blocks the thread in
which the admin port is served, and leaves its workers running where it is killed.
"""
