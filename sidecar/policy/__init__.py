"""Policy: YAML files compiled to one immutable value, with every mistake reported at once, by file and line."""
