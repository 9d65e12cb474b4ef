"""The admin port: its pages, who may see them, and where they are served."""

PORT_VARIABLE = "SIDECAR_ADMIN_PORT"
"""The environment variable that asks for the pages in a server that is not ours."""
