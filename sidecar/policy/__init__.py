"""Policy: YAML files compiled to one immutable value, with every mistake reported at once, by file and line."""

POLICY_VARIABLE = "SIDECAR_POLICY"
"""The environment variable that names a policy's file or folder, where no argument does."""
